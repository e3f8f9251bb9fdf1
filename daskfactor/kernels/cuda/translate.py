"""Scalar functions of kernels as CUDA C++: one text of the arithmetic, for every machine.

What numba compiles for processors is Python that does arithmetic on numbers: the functions of
a law (`Entry`), polynomials, rounds of Philox, an entry's step. `Translation` writes the same
functions as templates, types left to the compiler, and functions that they call before them.
Operations stay in their order, so that without fused multiply-adds results have the same bits.

Understood are assignments, conditions, loops over ``range`` and ``while True``, tuples, calls of
such functions, and the few names of NumPy in `NAMES`. Anything else is an error when a kernel is
made, not a wrong number when it runs.
"""

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np

Function = Callable[..., Any]

TYPES = {
    np.bool_: "bool",
    np.float32: "float",
    np.float64: "double",
    np.int8: "signed char",
    np.int16: "short",
    np.int32: "int",
    np.int64: "long long",
    np.uint8: "unsigned char",
    np.uint16: "unsigned short",
    np.uint32: "unsigned int",
    np.uint64: "unsigned long long",
    float: "double",
    int: "long long",
}
NAMES = {np.sqrt: "root", np.floor: "whole", np.abs: "size_of", abs: "size_of", max: "larger"}
NAMES |= {min: "smaller"}
"""Functions that have a name of their own in ``prelude.h``."""
OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.And: "&&",
    ast.Or: "||",
    ast.USub: "-",
    ast.Not: "!",
}


class Untranslatable(Exception):  # noqa: N818  # a defect of a law or of the package, not of input
    """A function uses what `Translation` does not understand."""


class Translation:
    """C++ of scalar functions, each written once and after those that it calls.

    Parameters
    ----------
    numbers
        Length of `Likelihood.numbers`, and of ``*numbers``.
    """

    def __init__(self, numbers: int = 0) -> None:
        self.numbers = numbers
        self._names: dict[Any, str] = {}
        self._texts: list[str] = []

    def add(self, function: Any, name: str | None = None) -> str:
        """Write a function and all that it calls; return its name in C++."""
        plain = getattr(function, "py_func", function)
        if not inspect.isfunction(plain):
            raise Untranslatable(f"{plain!r} has no form in C++ here")
        if plain not in self._names:
            name = name or f"{plain.__name__.strip('_')}_{len(self._names)}"
            self._names[plain] = name
            self._texts.append(_Writer(self, plain).text(name))
        return self._names[plain]

    @property
    def text(self) -> str:
        """Everything that has been added, in an order in which it compiles."""
        return "\n".join(self._texts)


class _Writer:
    """Writes one function."""

    def __init__(self, translation: Translation, function: Function) -> None:
        self.translation = translation
        self.function = function
        names = inspect.getclosurevars(function)
        self.outer = {**vars(builtins), **names.globals, **names.nonlocals}
        self.local: set[str] = set()
        self.count = 0

    def text(self, name: str) -> str:
        """Return the function as a template, under a name."""
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(self.function))).body
        if not isinstance(tree, ast.FunctionDef):
            raise Untranslatable(f"{name} is no plain function")
        parameters = [each.arg for each in tree.args.args]
        self.local |= set(parameters)
        kinds = ", ".join(f"class T{n}" for n in range(len(parameters)))
        arguments = ", ".join(f"T{n} {each}_" for n, each in enumerate(parameters))
        body = "\n".join(self.statement(each) for each in tree.body)
        template = f"template <{kinds}>\n" if parameters else ""
        return f"{template}DEVICE auto {name}({arguments}) {{\n{body}\n}}\n"

    def refuse(self, node: ast.AST) -> Untranslatable:
        text = ast.unparse(node)
        return Untranslatable(f"{self.function.__qualname__}: {text!r} has no form in C++ here")

    def sign(self, op: ast.AST, node: ast.AST) -> str:
        """Return an operator as C++ writes it; powers and whole quotients differ there."""
        if type(op) not in OPERATORS:
            raise self.refuse(node)
        return OPERATORS[type(op)]

    # -- statements --------------------------------------------------------------------

    def block(self, body: list[ast.stmt], *names: str) -> str:
        """Write a block, beyond whose end none of the names holds that it introduces."""
        before, self.local = self.local, self.local | {*names}
        text = "\n".join(self.statement(each) for each in body)
        self.local = before
        return f"{{\n{text}\n}}"

    def statement(self, node: ast.stmt) -> str:
        match node:
            case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
                return ""
            case ast.Return(value=ast.IfExp(test=test, body=body, orelse=other)) if _is_call(
                test, "isinstance"
            ):
                # The branch that is not taken need not have the same type.
                condition, first, second = map(self.value, (test, body, other))
                return f"if constexpr ({condition}) return {first}; else return {second};"
            case ast.Return(value=value) if value is not None:
                return f"return {self.value(value)};"
            case ast.Assign(targets=[target], value=value):
                return self.assignment(target, value)
            case ast.AugAssign(target=target, op=op, value=value):
                return f"{self.place(target)} {self.sign(op, node)}= {self.value(value)};"
            case ast.If(test=test, body=body, orelse=other):
                first = self.declared(body, other)
                rest = f" else {self.block(other)}" if other else ""
                return f"{first}if ({self.value(test)}) {self.block(body)}{rest}"
            case ast.While(test=test, body=body, orelse=[]):
                return f"while ({self.value(test)}) {self.block(body)}"
            case ast.For(
                target=ast.Name(id=name),
                iter=ast.Call(func=ast.Name(id="range"), args=[_] | [_, _]) as over,
                orelse=[],
            ):
                ends = [self.value(each) for each in over.args]
                low, high = ("0", ends[0]) if len(ends) == 1 else ends
                text = self.block(node.body, name)
                return f"for (long long {name}_ = {low}; {name}_ < {high}; ++{name}_) {text}"
            case ast.Expr(value=ast.Call() as call):
                return f"{self.value(call)};"
            case ast.Continue():
                return "continue;"
            case ast.Break():
                return "break;"
        raise self.refuse(node)

    def declared(self, body: list[ast.stmt], other: list[ast.stmt]) -> str:
        """Declare the names that both branches introduce, which outlive them."""
        branches, texts = [_introduced(branch) for branch in (body, other)], []
        for name in branches[0]:
            if name in branches[1] and name not in self.local:
                first, second = (self.value(branch[name]) for branch in branches)
                texts.append(f"decltype(either({first}, {second})) {name}_;\n")
                self.local.add(name)
        return "".join(texts)

    def assignment(self, target: ast.expr, value: ast.expr) -> str:
        match target, value:
            case ast.Name(id=name), ast.Call(func=ast.Name(id="type"), args=[of]):
                self.local.add(name)
                return f"using {name}_ = decltype({self.value(of)});"
            case ast.Tuple(elts=names), ast.Tuple(elts=values) if len(names) == len(values):
                pairs = list(zip(names, values, strict=True))
                texts = [self.assignment(*pair) for pair in pairs if _is_call(pair[1], "type")]
                # All values before any name changes.
                rest = [(pair, self.fresh()) for pair in pairs if not _is_call(pair[1], "type")]
                texts += [f"auto {fresh} = {self.value(pair[1])};" for pair, fresh in rest]
                return "\n".join([*texts, *(self.assign(pair[0], fresh) for pair, fresh in rest)])
            case ast.Tuple(), _:
                fresh = self.fresh()
                return f"auto {fresh} = {self.value(value)};\n{self.assign(target, fresh)}"
        return self.assign(target, self.value(value))

    def fresh(self) -> str:
        """Return a new name."""
        self.count += 1
        return f"t{self.count}"

    def assign(self, target: ast.expr, text: str) -> str:
        """Assign a value, a text of C++, to a name or to names in a tuple."""
        if isinstance(target, ast.Tuple):
            parts = (self.assign(name, f"at<{n}>({text})") for n, name in enumerate(target.elts))
            return "\n".join(parts)
        if isinstance(target, ast.Name) and target.id not in self.local:
            self.local.add(target.id)
            return f"auto {target.id}_ = {text};"
        return f"{self.place(target)} = {text};"

    def place(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name) if name in self.local:
                return f"{name}_"  # no name of the prelude's
            case ast.Subscript(value=value, slice=index):
                return f"{self.value(value)}[{self.value(index)}]"
        raise self.refuse(node)

    # -- values ------------------------------------------------------------------------

    def value(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name) if name in self.local:
                return f"{name}_"
            case ast.Constant() | ast.Name() | ast.Attribute():
                return _literal(self.constant(node), node, self)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return f"over({self.value(left)}, {self.value(right)})"
            case ast.BinOp(left=left, op=op, right=right):
                return f"({self.value(left)} {self.sign(op, node)} {self.value(right)})"
            case ast.UnaryOp(op=op, operand=operand):
                return f"({self.sign(op, node)}{self.value(operand)})"
            case ast.BoolOp(op=op, values=values):
                return "(" + f" {OPERATORS[type(op)]} ".join(map(self.value, values)) + ")"
            case ast.Compare(left=left, ops=ops, comparators=others):
                sides = [self.value(each) for each in (left, *others)]
                each = [f"{a} {self.sign(o, node)} {b}" for a, o, b in zip(sides, ops, sides[1:])]  # noqa: B905
                return "(" + " && ".join(each) + ")"
            case ast.IfExp(test=test, body=body, orelse=other):
                return f"({self.value(test)} ? {self.value(body)} : {self.value(other)})"
            case ast.Tuple(elts=values):
                return f"pack({', '.join(map(self.value, values))})"
            case ast.Subscript(value=value, slice=ast.Constant(value=int(index))):
                return f"at<{index}>({self.value(value)})"
            case ast.Subscript():
                return self.place(node)
            case ast.Call(keywords=[]):
                return self.call(node)
        raise self.refuse(node)

    def constant(self, node: ast.expr) -> Any:
        """Return the value of a name from outside the function."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in self.outer:
                return self.outer[name]
            case ast.Attribute(value=value, attr=name):
                return getattr(self.constant(value), name)
        raise self.refuse(node)

    def call(self, node: ast.Call) -> str:
        match node.func:
            case ast.Call(func=ast.Name(id="type"), args=[of]):
                return f"decltype({self.value(of)})({self.value(node.args[0])})"
            case ast.Name(id=name) if name in self.local:  # a type, or a function that is given
                return f"{name}_({self.arguments(node)})"
            case ast.Attribute(value=value, attr="view"):
                kind = TYPES[self.constant(node.args[0])]
                return f"bits<{kind}>({self.value(value)})"
        called = self.constant(node.func)
        if called is isinstance:
            kind = TYPES[self.constant(node.args[1])]
            return f"same<decltype({self.value(node.args[0])}), {kind}>"
        if called in TYPES:
            return f"(({TYPES[called]})({self.value(node.args[0])}))"
        if called in NAMES:
            return f"{NAMES[called]}({self.arguments(node)})"
        if not callable(called):
            raise self.refuse(node)
        return f"{self.translation.add(called)}({self.arguments(node)})"

    def arguments(self, node: ast.Call) -> str:
        texts: list[str] = []
        for each in node.args:
            if isinstance(each, ast.Starred):
                of = self.value(each.value)
                texts += [f"at<{n}>({of})" for n in range(self.translation.numbers)]
            else:
                texts.append(self.value(each))
        return ", ".join(texts)


def _introduced(branch: list[ast.stmt]) -> dict[str, ast.expr]:
    """Return the names that statements assign to, and the first value of each."""
    values: dict[str, ast.expr] = {}
    for each in branch:
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            values.setdefault(each.targets[0].id, each.value)
    return values


def _is_call(value: ast.expr, name: str) -> bool:
    return isinstance(value, ast.Call) and getattr(value.func, "id", "") == name


def _literal(value: Any, node: ast.expr, writer: _Writer) -> str:
    """Return a constant with its type and all of its bits."""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, np.float32):
        return f"({float(value).hex()}f)"
    if isinstance(value, float | np.float64):
        number, sign = float(value), "-" if value < 0 else ""
        special = "nothing()" if np.isnan(number) else f"endless({sign}1.0)"
        return f"({number.hex()})" if np.isfinite(number) else special
    if isinstance(value, np.integer):
        kind = TYPES.get(type(value))
        if kind is not None:
            return f"(({kind}){int(value)}{'ull' if kind.startswith('unsigned') else ''})"
    if isinstance(value, int):
        return str(value) if abs(value) < 2**31 else f"{value}ll"
    raise writer.refuse(node)
