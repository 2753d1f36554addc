"""Operators ``torch.ops.torch_kvq.*``: schema (``schemas.py``), naive reference (``reference.py``), fakes, kernels.

The reference serves every device for which no kernel was loaded; ``torch_kvq.backends.report()`` says which runs.
"""

import torch

from . import fakes, reference, schemas

_reference_library = torch.library.Library(schemas.NAMESPACE, "IMPL")
for _name in schemas.NAMES:
    _reference_library.impl(_name, getattr(reference, _name), "CompositeExplicitAutograd")

rotate = torch.ops.torch_kvq.rotate.default
encode = torch.ops.torch_kvq.encode.default
decode = torch.ops.torch_kvq.decode.default
attend = torch.ops.torch_kvq.attend.default
qk = torch.ops.torch_kvq.qk.default
pv = torch.ops.torch_kvq.pv.default
merge = torch.ops.torch_kvq.merge.default

__all__ = ["attend", "decode", "encode", "fakes", "merge", "pv", "qk", "reference", "rotate", "schemas"]
