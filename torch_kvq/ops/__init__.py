"""Operators ``torch.ops.torch_kvq.*``: schema (``schemas.py``), naive references (``reference.py``,
``sparse_reference.py``), fakes, kernels; ``problems.py`` checks their arguments where no compiled kernel does; ``fused.py`` has
those that are several others in one.

The reference serves every device for which no kernel was loaded; ``torch_kvq.backends.report()`` says which runs.
"""

from collections.abc import Callable

import torch

from . import fakes, fused, problems, reference, schemas, sparse_reference


def checked(name: str) -> Callable[..., None]:
    """The reference of operator ``name`` behind the checks that compiled kernels make, too."""
    check, run = getattr(problems, name), getattr(reference if name in schemas.DENSE_NAMES else sparse_reference, name)

    def serve(*args) -> None:
        check(*args)
        run(*args)

    return serve


_reference_library = torch.library.Library(schemas.NAMESPACE, "IMPL")
for _name in schemas.NAMES:
    _reference_library.impl(_name, checked(_name), "CompositeExplicitAutograd")
for _name in schemas.FUSED_NAMES:
    _reference_library.impl(_name, getattr(fused, _name), "CompositeExplicitAutograd")

rotate = torch.ops.torch_kvq.rotate.default
encode = torch.ops.torch_kvq.encode.default
decode = torch.ops.torch_kvq.decode.default
attend = torch.ops.torch_kvq.attend.default
qk = torch.ops.torch_kvq.qk.default
pv = torch.ops.torch_kvq.pv.default
merge = torch.ops.torch_kvq.merge.default
quantise_query = torch.ops.torch_kvq.quantise_query.default
index_keys = torch.ops.torch_kvq.index_keys.default
sign_scores = torch.ops.torch_kvq.sign_scores.default
top_p_select = torch.ops.torch_kvq.top_p_select.default
qk_selected = torch.ops.torch_kvq.qk_selected.default
attend_selected = torch.ops.torch_kvq.attend_selected.default
gather_selected = torch.ops.torch_kvq.gather_selected.default
encode_kv = torch.ops.torch_kvq.encode_kv.default
sign_top_p_select = torch.ops.torch_kvq.sign_top_p_select.default
attend_top_p_select = torch.ops.torch_kvq.attend_top_p_select.default
merge_selected = torch.ops.torch_kvq.merge_selected.default

__all__ = [*schemas.NAMES, *schemas.FUSED_NAMES, "fakes", "fused", "problems", "reference", "schemas", "sparse_reference"]
