"""Wraps the private functions and classes of torch that gpipe uses, under descriptive names.

A new version of torch may rename or change them. `tests/test_torch.py` tests each wrapper on the installed torch. If
a test fails, it reports where gpipe uses the wrapper. Differences between versions of torch are handled only here. If
gpipe does not use a public function because it is too slow, the docstring names this function.

Some private names have no wrapper, because much code outside of torch relies on them, so torch is unlikely to rename
them: `_parameters`, `_buffers`, `_modules` and `_apply` of a module, `_version` and `_base` of a tensor.

A few internal names without an underscore also have no wrapper, because it would not make the code clearer. Only one
or two modules use them. The test lists which modules may use these names:

- `redispatch` of an operator
- `autocast_increment_nesting` and `autocast_decrement_nesting`
- `autograd.function.BackwardCFunction`
- `conv_flop_count`, `sdpa_flop_count` and `sdpa_backward_flop_count` of `utils.flop_counter`
- `utils.weak.WeakIdKeyDictionary`
"""
