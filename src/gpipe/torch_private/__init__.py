"""All of torch that gpipe uses and torch does not document, under names that say what it stands for.

A new torch may rename or change any of it: `tests/test_torch_private.py` tries each on the torch that is installed,
and says what broke, what it is for and where it is used. What differs between versions of torch is told apart here
and nowhere else. Where a public thing would do but for its price, the docstring names it.

Some names stay where they are used, because so much code uses them that torch can hardly rename them: `_parameters`,
`_buffers`, `_modules` and `_apply` of a module, `_version` and `_base` of a tensor.
"""
