"""All of torch that is private, under names that say what it stands for.

A new torch may rename or change any of it: `tests/test_torch.py` tries each on the torch that is installed,
and says what broke, what it is for and where it is used. What differs between versions of torch is told apart here
and nowhere else. Where a public thing would do but for its price, the docstring names it.

Some names stay where they are used, because so much code uses them that torch can hardly rename them: `_parameters`,
`_buffers`, `_modules` and `_apply` of a module, `_version` and `_base` of a tensor.

So do a few names without an underscore that torch has for itself all the same, each in one module or two, where a
function of another name would explain nothing: `redispatch` of an operator, `autocast_increment_nesting` and
`autocast_decrement_nesting`, `autograd.function.BackwardCFunction`, of `utils.flop_counter` `conv_flop_count`,
`sdpa_flop_count` and `sdpa_backward_flop_count`, and `utils.weak.WeakIdKeyDictionary`. The test lists who uses them.
"""
