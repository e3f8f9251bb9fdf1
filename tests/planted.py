"""Samplers with planted bugs, which tests of distributions must see."""

from dataclasses import fields


def planted(sampler, *bugs):
    """Return a sampler whose kernel derives from ``bugs`` first: classes with other methods."""
    kind = type(sampler)

    def kernel(self, *given):
        made = kind.kernel(self, *given)
        return type(bugs[0].__name__, (*bugs, type(made)), {})(**vars(made))

    changed = type(kind.__name__, (kind,), {"kernel": kernel})
    return changed(**{own.name: getattr(sampler, own.name) for own in fields(sampler) if own.init})
