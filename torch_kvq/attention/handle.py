"""Tensor handles: what ``update`` returns for keys and values whose data stay in the layer.

A handle has the shape, dtype and device of the keys or values and no data. ``__torch_function__`` recognises what
attention code does to it (``F.scaled_dot_product_attention``, the eager pair ``q @ k^T`` and ``p @ v``, ``repeat_kv``) and
answers from the pieces; any other function sees the dense tensor, which is correct, and counted if packed tokens had
to be rebuilt for it. Handlers register themselves with :func:`handles`; ``mla.py`` adds those of latent attention.
"""

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from .pieces import Pieces, upper_left_causal

_HANDLERS: dict[Callable, list[tuple[Callable, frozenset[str] | None]]] = {}


def handles(*functions: Callable) -> Callable:
    """Registers a handler for torch functions; it returns ``NotImplemented`` for what it does not know.

    A call with a keyword that the handler does not name (``out=``) passes it by.
    """

    def register(handler: Callable) -> Callable:
        parameters = inspect.signature(handler).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        named = (name for name, each in parameters.items() if each.kind is not each.VAR_POSITIONAL)
        names = None if takes_any else frozenset(named)
        for function in functions:
            _HANDLERS.setdefault(function, []).append((handler, names))
        return handler

    return register


class LazyTensor(torch.Tensor):
    """A tensor without data that can be made dense. Subclasses define ``dense(reason)``.

    What is read most is held as plain attributes, which hide the properties of ``torch.Tensor`` and their dispatch.
    """

    shape: torch.Size = torch.Size()
    dtype: torch.dtype | None = None
    device: torch.device | None = None

    @classmethod
    def of_shape(cls, shape, like: torch.Tensor) -> "LazyTensor":
        """An empty shell of ``shape`` with the dtype and device of ``like``."""
        shape, dtype, device = torch.Size(shape), like.dtype, like.device
        shell = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        shell.shape, shell.dtype, shell.device = shape, dtype, device
        return shell

    def dense(self, reason: str) -> torch.Tensor:
        raise NotImplementedError

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for handler, names in _HANDLERS.get(func, ()):
            if kwargs and names is not None and not names.issuperset(kwargs):
                continue
            out = handler(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*_all_dense(args, _name(func)), **_all_dense(kwargs, _name(func)))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*_all_dense(args, str(func)), **_all_dense(kwargs or {}, str(func)))


def _name(func: Callable) -> str:
    return getattr(func, "__name__", str(func))


def _all_dense(tree, reason: str):
    return tree_map(lambda x: x.dense(reason) if isinstance(x, LazyTensor) else x, tree)


class KVHandle(LazyTensor):
    """Keys (role ``k``) or values (``v``) of a layer, ``[B, H * repeat, T, D]``.

    ``form`` follows ``repeat_kv`` and ``transpose``: ``plain``, ``grouped`` ``[B, H, repeat, T, D]`` or ``transposed``
    ``[B, H * repeat, D, T]``.
    """

    pieces: Pieces
    role: str
    repeat: int
    form: str

    @staticmethod
    def make(pieces: Pieces, role: str, repeat: int = 1, form: str = "plain") -> "KVHandle":
        exact = pieces.exact_keys if role == "k" else pieces.exact_values
        batch, heads, exact_len, dim = exact.shape
        tokens = exact_len + pieces.length
        if form == "plain":
            shape = (batch, heads * repeat, tokens, dim)
        elif form == "grouped":
            shape = (batch, heads, repeat, tokens, dim)
        else:
            shape = (batch, heads * repeat, dim, tokens)
        handle = KVHandle.of_shape(shape, exact)
        handle.pieces, handle.role, handle.repeat, handle.form = pieces, role, repeat, form
        return handle

    def dense(self, reason: str) -> torch.Tensor:
        x = self.pieces.dense(self.role, reason)
        if self.repeat > 1 or self.form == "grouped":
            x = x[:, :, None].expand(*x.shape[:2], self.repeat, *x.shape[2:])
            x = x if self.form == "grouped" else x.reshape(x.shape[0], -1, *x.shape[3:])
        return x.transpose(-1, -2) if self.form == "transposed" else x

    def in_form(self, form: str, repeat: int | None = None) -> "KVHandle":
        return KVHandle.make(self.pieces, self.role, self.repeat if repeat is None else repeat, form)

    def __reduce_ex__(self, protocol):
        return self.dense("pickle").__reduce_ex__(protocol)


def is_handle(x, role: str, form: str = "plain") -> bool:
    return isinstance(x, KVHandle) and x.role == role and x.form == form


@handles(F.scaled_dot_product_attention)
def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if not (is_handle(key, "k") and is_handle(value, "v")):
        return NotImplemented
    if key.pieces is not value.pieces and not key.pieces.same_as(value.pieces):
        return NotImplemented
    pieces, packed = key.pieces, key.pieces.is_packed
    strange = isinstance(query, LazyTensor) or query.dim() != 4 or query.shape[0] != key.shape[0]
    if strange or packed and dropout_p:
        return NotImplemented
    if packed:
        mask = upper_left_causal(query, pieces.num_tokens) if is_causal else attn_mask
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        out, _ = pieces.attend(query, mask, scale, lse=pieces.layer.unread_lse(query))
    else:
        pieces.layer.saw_queries(query)
        pieces.layer.saw_mask(attn_mask)
        dense = (key.dense("sdpa"), value.dense("sdpa"))
        out = F.scaled_dot_product_attention(query, *dense, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    pieces.layer.answered(packed)
    return out


@handles(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
def _matmul(left, right):
    if isinstance(left, LazyTensor) or not isinstance(right, KVHandle) or left.dim() != 4 or left.shape[0] != right.shape[0]:
        return NotImplemented
    if right.shape[1] not in (1, left.shape[1]):
        return NotImplemented
    if is_handle(right, "k", "transposed"):
        right.pieces.layer.saw_queries(left)
        return right.pieces.scores(left) if right.pieces.is_packed else left @ right.dense("matmul")
    if is_handle(right, "v"):
        pieces = right.pieces
        pieces.layer.saw_weights(left)
        out = pieces.weighted_values(left) if pieces.is_packed else left @ right.dense("matmul")
        pieces.layer.answered(pieces.is_packed)
        return out
    return NotImplemented


@handles(torch.Tensor.transpose, torch.transpose)
def _transpose(x, dim0, dim1):
    if not isinstance(x, KVHandle) or {dim0 % 4, dim1 % 4} != {2, 3} or x.form == "grouped":
        return NotImplemented
    return x.in_form("plain" if x.form == "transposed" else "transposed")


@handles(torch.Tensor.__getitem__)
def _getitem(x, index):
    everything = slice(None)
    whole = isinstance(index, tuple) and len(index) in (3, 4, 5) and index[2] is None
    if not (isinstance(x, KVHandle) and x.form == "plain" and x.repeat == 1 and whole):
        return NotImplemented
    if all(isinstance(part, slice) and part == everything for place, part in enumerate(index) if place != 2):
        return x.in_form("grouped")
    return NotImplemented


@handles(torch.Tensor.expand)
def _expand(x, *shape):
    shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if not (isinstance(x, KVHandle) and x.form == "grouped" and x.repeat == 1 and len(shape) == 5):
        return NotImplemented
    kept = all(want in (-1, have) for place, (want, have) in enumerate(zip(shape, x.shape)) if place != 2)
    return x.in_form("grouped", shape[2]) if kept and shape[2] > 0 else NotImplemented


@handles(torch.Tensor.reshape)
def _reshape(x, *shape):
    shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if not (isinstance(x, KVHandle) and x.form == "grouped" and len(shape) == 4):
        return NotImplemented
    batch, heads, repeat, tokens, dim = x.shape
    whole = (batch, heads * repeat, tokens, dim)
    inferred = [want for want in shape if want == -1]
    fits = all(want in (-1, have) for want, have in zip(shape, whole))
    return x.in_form("plain") if fits and len(inferred) <= 1 else NotImplemented


@handles(torch.Tensor.to, torch.Tensor.contiguous, torch.Tensor.detach)
def _unchanged(x, *args, **kwargs):
    """``to`` the same dtype and device, ``contiguous`` and ``detach`` change nothing."""
    if not isinstance(x, LazyTensor):
        return NotImplemented
    for wanted in (*args, *kwargs.values()):
        if isinstance(wanted, torch.dtype) and wanted != x.dtype or isinstance(wanted, torch.Tensor):
            return NotImplemented
        is_place = isinstance(wanted, (torch.device, str, int)) and not isinstance(wanted, bool)
        if is_place and not _is_at(x.device, torch.device(wanted)):
            return NotImplemented
    return x


def _is_at(device: torch.device, wanted: torch.device) -> bool:
    return wanted == device or (wanted.type == device.type == "cpu")


_PROPERTIES = (
    *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn", "grad", "is_leaf", "itemsize"),
    *("is_cpu", "is_cuda", "is_mps", "is_meta", "is_sparse", "is_quantized", "is_nested"),
)
_METHODS = (
    *(
        "size",
        "dim",
        "numel",
        "stride",
        "element_size",
        "is_floating_point",
        "is_complex",
        "is_inference",
        "get_device",
    ),
    *("__len__", "__repr__", "__format__"),
)
_METADATA = {
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(torch.Tensor, name) for name in _METHODS),
    *(torch.is_tensor, torch.is_floating_point, torch.numel),
}
