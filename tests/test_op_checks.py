"""What operators refuse where no compiled kernel checks: the pure-torch reference, and tensors on the meta device."""

import functools
import os
import re
import subprocess
import sys

import pytest
import test_metal_backend
import test_metal_sparse
import test_ops
import test_sparse_kernels
import test_sparse_ops
import torch
from op_cases import Case, problem
from sparse_cases import SparseCase, selected_problem
from test_ops import ARGUMENTS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from torch_kvq import ops
from torch_kvq.ops.schemas import DENSE_NAMES, FUSED_NAMES, NAMES

CALLS = {name: arguments for module in (test_ops, test_sparse_ops) for name, arguments in module.calls()}
SELECTIONS = [bad for bad in test_sparse_kernels.BAD if bad[0].startswith(("indices must be from", "count must be from"))]


def outputs(arguments):
    """All tensors among the arguments, as they are now."""
    return [x.clone() for x in arguments if isinstance(x, torch.Tensor)]


def same(xs, ys):
    torch.testing.assert_close(xs, ys, rtol=0, atol=0, equal_nan=True)


def on_meta(arguments):
    return tree_map_only(torch.Tensor, lambda x: x.to("meta"), arguments)


# ---- the reference


def refused(name, arguments, message):
    before = outputs(arguments)
    with pytest.raises(RuntimeError) as caught:
        ops.checked(name)(*arguments)
    assert message in str(caught.value) and ", got " in str(caught.value)
    same(outputs(arguments), before)


@pytest.mark.parametrize("message, name, change", test_metal_backend.BAD, ids=[bad[0] for bad in test_metal_backend.BAD])
def test_attend(message, name, change):
    arguments, _, out, lse = problem(Case("errors"))
    named = dict(zip(ARGUMENTS, (*arguments, out.clone(), lse.clone())))
    named[name] = change(named)
    refused("attend", tuple(named.values()), message)


@pytest.mark.parametrize("op, message, name, change", test_metal_sparse.BAD, ids=[bad[1] for bad in test_metal_sparse.BAD])
def test_sparse_operators(op, message, name, change):
    named = dict(zip(test_metal_sparse.NAMES_OF[op], CALLS[op]))
    named[name] = change(named[name])
    refused(op, tuple(named.values()), message)


@pytest.mark.parametrize("message, name, change", SELECTIONS, ids=[bad[0] for bad in SELECTIONS])
def test_values_of_a_selection(message, name, change):
    arguments, _, _ = selected_problem(SparseCase("errors", share=0.9))
    named = dict(zip(test_sparse_kernels.ARGUMENTS, (*arguments, torch.zeros(1, 6, 1, 64), torch.zeros(1, 6, 1))))
    named[name] = change(named)
    refused("attend_selected", tuple(named.values()), message)


@pytest.mark.parametrize("name", NAMES)
def test_every_output_has_a_shape_and_a_dtype(name):
    arguments = CALLS[name]
    for wrong in (arguments[-1].double(), torch.cat([arguments[-1]] * 2)):
        with pytest.raises(RuntimeError, match=r" must .*, got "):
            ops.checked(name)(*arguments[:-1], wrong)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_right_passes_and_is_answered(name):
    arguments = tree_map_only(torch.Tensor, torch.clone, CALLS[name])
    wanted = tree_map_only(torch.Tensor, torch.clone, CALLS[name])
    ops.checked(name)(*arguments)
    getattr(ops.reference if name in DENSE_NAMES else ops.sparse_reference, name)(*wanted)
    same(outputs(arguments), outputs(wanted))


def test_it_serves_where_no_kernel_is_loaded():
    code = "import torch, torch_kvq; x = torch.zeros(1, 8); torch_kvq.ops.rotate(x, *[x[:0]] * 3, False, x[:, :4])"
    env = {**os.environ, "KVQ_CPU_ISA": "reference"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stderr.endswith("RuntimeError: out must have the shape [1, 8], got float32 [1, 4] on cpu\n")


SIGNS = [
    ("have 4 dims", lambda x: x.new_zeros(())),
    ("have 2 words", lambda x: x.new_empty(0)),
    ("have the shape", lambda x: x[:0]),
    ("have the shape", lambda x: x[:, :0]),
    ("have the shape", lambda x: x[:, :, :0]),
]


@pytest.mark.parametrize("rule, change", SIGNS)
def test_an_index_without_signs(rule, change):
    arguments = list(CALLS["sign_scores"])
    arguments[2] = change(arguments[2])
    refused("sign_scores", arguments, f"sign must {rule}")


@pytest.mark.parametrize("batch, queries, tokens", [(0, 1, 33), (2, 0, 33), (2, 1, 0), (2, 3, 0)])
@pytest.mark.parametrize("serve", [ops.checked, functools.partial(getattr, ops)], ids=["reference", "served"])
def test_no_sequences_queries_or_tokens(serve, batch, queries, tokens):
    """As a cache has them whose batch was emptied."""
    rows, int32 = (batch, 6, queries), torch.int32
    lses, out, lse = torch.zeros(2, *rows), torch.full((*rows, 64), torch.nan), torch.full(rows, torch.nan)
    index = torch.zeros(batch, 2, tokens, 2, dtype=int32), torch.ones(batch, 2, tokens, dtype=torch.float16), torch.empty(0)
    scores, indices = torch.empty(*rows, tokens), torch.empty(batch, 2, tokens, dtype=int32)
    count = torch.full((batch, 2), 7, dtype=int32)
    serve("sign_scores")(torch.zeros(*rows, 4, 2, dtype=int32), torch.zeros(*rows, 4), *index, 64, 1.0, 0, scores)
    serve("top_p_select")(scores, lses[0], None, None, 0.9, indices, count)
    assert not count.any()
    store = [torch.zeros(batch, 2, tokens, 64)]
    serve("attend_selected")(torch.zeros(*rows, 64), store, store, indices, count, None, 1.0, 0.0, out, lse)
    assert not out.any() and (lse == -torch.inf).all()


class References:
    """The other operators of one that is several, by their references."""

    def __getattr__(self, name):
        return functools.partial(getattr(ops.fused, name), parts=self) if name in FUSED_NAMES else ops.checked(name)


def step_of(**changes):
    """Arguments of attend_top_p_select by name, its outputs poisoned."""
    schema = ops.attend_top_p_select._schema.arguments
    named = dict(zip((x.name for x in schema), tree_map_only(torch.Tensor, torch.clone, CALLS["attend_top_p_select"])))
    named |= {key: change(named[key]) for key, change in changes.items()}
    poisons = {x.name: 7 if named[x.name].dtype == torch.int32 else torch.nan for x in schema if x.alias_info is not None}
    return named | {key: torch.full_like(named[key], poison) for key, poison in poisons.items()}


def without_sequences(x):
    return [y[:0] if y.dim() > 2 else y for y in x] if isinstance(x, list) else x[:0] if x.dim() > 2 else x


PER_SEQUENCE = (
    "q keys values exact_keys exact_values query_centre centre balance sign factor bias out lse planes terms scores indices"
)
CORNERS = {
    "no_sequences": dict.fromkeys(PER_SEQUENCE.split(), without_sequences) | dict(count=lambda x: x[:0]),
    "no_queries": dict.fromkeys(("q", "out", "lse", "planes", "terms", "scores"), lambda x: x[:, :, :0]),
    "no_tokens": dict.fromkeys(("scores", "indices"), lambda x: x[..., :0]),
    "no_window": dict.fromkeys(("exact_keys", "exact_values"), lambda x: x[:, :, :0]),
    "nothing_exact": dict.fromkeys(("exact_keys", "exact_values"), lambda x: x[:, :, :0]) | dict(sink_logits=lambda x: None),
    "no_room": dict(indices=lambda x: x[..., :0]),
    "room_of_3": dict(indices=lambda x: x[..., :3]),
    "a_selection_a_head": dict(indices=lambda x: x.repeat(1, 3, 1), count=lambda x: x.repeat(1, 3)),
    "values_are_keys": dict(values=lambda x: []),
    "nothing_wanted": dict(top_p=lambda x: 0.0),
    "everything_wanted": dict(top_p=lambda x: float("inf")),
    "scores_in_half": dict(scores=torch.Tensor.half),
    "gradients": dict(q=lambda x: x.requires_grad_(), exact_values=lambda x: x.requires_grad_()),
    "nan_in_a_query": dict(q=lambda x: x.index_fill(1, torch.tensor(0), torch.nan)),
    "nan_in_a_value": dict(exact_values=lambda x: x.index_fill(1, torch.tensor(0), torch.nan)),
}


@pytest.mark.parametrize("name", CORNERS)
def test_corners_of_a_step_in_one(name):
    ours, theirs = step_of(**CORNERS[name]), step_of(**CORNERS[name])
    ops.attend_top_p_select(*ours.values())
    References().attend_top_p_select(*theirs.values())
    for key, limit in (("out", 1e-5), ("lse", 1e-5), ("count", 0)):
        torch.testing.assert_close(ours[key], theirs[key], rtol=limit, atol=limit, equal_nan=True)
    valid = torch.arange(ours["indices"].shape[-1]) < ours["count"].unsqueeze(-1)
    assert torch.equal(ours["indices"][valid], theirs["indices"][valid])


def test_a_step_in_one_may_answer_where_its_query_was():
    ours, theirs = step_of(), step_of()
    ours["out"] = ours["q"]
    for named in (ours, theirs):
        ops.attend_top_p_select(*named.values())
    same([ours[key] for key in ("out", "lse", "count")], [theirs[key] for key in ("out", "lse", "count")])


@pytest.mark.parametrize("serve", [ops.checked, functools.partial(getattr, ops)], ids=["reference", "served"])
def test_a_mask_of_one_row_is_that_of_all(serve):
    (*arguments, _, scale, softcap), _, _ = selected_problem(SparseCase("mask", batch=2, queries=3, share=0.9))
    mask = torch.arange(130) % 3 > 0
    answers = []
    for each in (mask.expand(2, 6, 3, -1), mask[None, None, None]):
        answers.append((torch.full((2, 6, 3, 64), torch.nan), torch.full((2, 6, 3), torch.nan)))
        serve("attend_selected")(*arguments, each, scale, softcap, *answers[-1])
    assert answers[0][0].isfinite().all()
    same(*answers)


FUSED = [
    ("keys must have 4 dims", "encode_kv", "keys", lambda x: x[0]),
    ("values must be float32, bfloat16 or float16", "encode_kv", "values", lambda x: x.double()),
    ("key_codec must be six tensors", "encode_kv", "key_codec", lambda x: x[:5]),
    ("value_codec must be six tensors", "encode_kv", "value_codec", lambda x: [*x, x[0]]),
    ("value_levels must have the shape", "encode_kv", "value_codec", lambda x: [x[0][:1], *x[1:]]),
    ("value_rule must be from 0 to 3", "encode_kv", "value_rule", lambda x: 4),
    ("start must be at least 0", "encode_kv", "start", lambda x: -1),
    ("key_scale must have a capacity of at least 1033", "encode_kv", "start", lambda x: 1000),
    ("value_sign must be int32", "encode_kv", "value_sign", lambda x: x.long()),
    ("value_mag must have 1 to 3 planes", "encode_kv", "value_mag", lambda x: x[0]),
    ("value_scale must be float16", "encode_kv", "value_scale", lambda x: x.float()),
    ("outs must have two pieces", "merge_selected", "outs", lambda x: x[0, 0, 0, 0, 0]),
    ("outs must have two pieces", "merge_selected", "outs", lambda x: x[:1]),
    ("outs must have two pieces of", "merge_selected", "outs", lambda x: x[:, :, :1]),
    ("outs must be float32, bfloat16 or float16", "merge_selected", "outs", lambda x: x.int()),
    ("lses must have the shape", "merge_selected", "lses", lambda x: x[:1]),
    ("lses must have the shape", "merge_selected", "lses", lambda x: x[0]),
    ("out must have the shape", "merge_selected", "out", lambda x: x[:, :1]),
    ("lse must be float32", "merge_selected", "lse", lambda x: x.double()),
    ("scores must have 4 dims", "sign_top_p_select", "scores", lambda x: x[0]),
    ("exact_lse must be float32", "sign_top_p_select", "exact_lse", lambda x: x.double()),
    ("top_p must be at least 0", "sign_top_p_select", "top_p", lambda x: -1.0),
    ("indices must be int32", "sign_top_p_select", "indices", lambda x: x.long()),
    ("count must be int32", "sign_top_p_select", "count", lambda x: x.long()),
]


@pytest.mark.parametrize("rule, name, argument, change", FUSED, ids=[bad[0] for bad in FUSED])
def test_fused_operators_check_all_before_they_write(rule, name, argument, change):
    operator = getattr(ops, name)
    named = dict(zip((x.name for x in operator._schema.arguments), CALLS[name]))
    written = [x.name for x in operator._schema.arguments if x.alias_info is not None]
    named |= {key: torch.full_like(named[key], 7) for key in written}
    named[argument] = change(named[argument])
    with pytest.raises(RuntimeError, match=f"{rule}.*, got "):
        operator(*named.values())
    assert all((named[key] == 7).all() for key in written if key != argument)


STEP = [
    ("q must have the shape", "q", lambda x: x[0]),
    ("q must have", "q", lambda x: x.new_zeros(())),
    ("keys must be nine tensors", "keys", lambda x: x[:8]),
    ("exact_values must have the shape", "exact_values", lambda x: x[:, :, :1]),
    ("sink_logits must have the shape", "sink_logits", lambda x: x[:1]),
    ("balance must be", "balance", lambda x: x.double()),
    ("sign must be int32", "sign", lambda x: x.long()),
    ("out must have the shape", "out", lambda x: x[:, :1]),
    ("planes must be int32", "planes", lambda x: x.long()),
    ("count must have the shape", "count", lambda x: x[:, :1]),
    ("scores must have 4 dims", "scores", lambda x: x[0]),
    (r"scores must have \[1, 6, 2\] rows", "scores", lambda x: x[:, :3]),
    ("top_p must be at least 0", "top_p", lambda x: float("nan")),
]


@pytest.mark.parametrize("rule, argument, change", STEP, ids=[bad[0] for bad in STEP])
def test_a_step_in_one_is_checked_by_its_parts(rule, argument, change):
    operator = ops.attend_top_p_select
    named = dict(zip((x.name for x in operator._schema.arguments), CALLS["attend_top_p_select"]))
    named[argument] = change(named[argument])
    with pytest.raises(RuntimeError, match=f"{rule}.*, got "):
        operator(*named.values())


# ---- the meta device


@pytest.mark.parametrize("name", NAMES + FUSED_NAMES)
def test_some_tensors_on_meta_are_refused(name):
    operator, arguments = getattr(ops, name), CALLS[name]
    for place, argument in enumerate(operator._schema.arguments):
        if isinstance(arguments[place], torch.Tensor | list):
            mixed = [on_meta(x) if index == place else x for index, x in enumerate(arguments)]
            message = f"{argument.name} must be on cpu like other tensors of the call, got meta"
            with pytest.raises(RuntimeError, match=re.escape(message)):
                operator(*mixed)


@pytest.mark.parametrize("name", NAMES + FUSED_NAMES)
def test_all_on_meta_or_fake_are_traced(name):
    getattr(ops, name)(*on_meta(CALLS[name]))
    with FakeTensorMode() as mode:
        getattr(ops, name)(*tree_map_only(torch.Tensor, mode.from_tensor, CALLS[name]))
