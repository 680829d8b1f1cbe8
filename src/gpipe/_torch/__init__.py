"""Wraps the private parts of torch that gpipe uses, under names that say what they do.

A new version of torch may rename or change any of them. `tests/test_torch.py` tests each one on the installed torch,
and reports what broke and where gpipe uses it. Differences between versions of torch are handled only here. If a
public function would do but is too slow, the docstring names it.

Some private names stay where they are used, because too much code relies on them for torch to rename them:
`_parameters`, `_buffers`, `_modules` and `_apply` of a module, `_version` and `_base` of a tensor.

A few internal names without an underscore also stay in the one or two modules that use them, because a wrapper would
explain nothing. The test lists which modules may use these names:

- `redispatch` of an operator
- `autocast_increment_nesting` and `autocast_decrement_nesting`
- `autograd.function.BackwardCFunction`
- `conv_flop_count`, `sdpa_flop_count` and `sdpa_backward_flop_count` of `utils.flop_counter`
- `utils.weak.WeakIdKeyDictionary`
"""
