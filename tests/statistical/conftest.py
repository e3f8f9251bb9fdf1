from tests import several

several_blocks = several.several_blocks
