"""Problems of few rows: what each of the kernels for them answers, in the emulator and on a GPU."""

import dataclasses

import torch
from op_cases import CASES, Case

# What the kernels for few rows answer, in short contexts, whose warps share tiles, and in long ones.
FEW_ROWS = "T1 T33 T128 T4097 G1 G3 G8 G16 M2 M5 mask-bool mask-float mask-dead start softcap sink-logits no-sinks only-sinks"
FEW_ROWS += " no-exact only-exact nothing long-exact batch3 bits22 bits44 rotation-dense rotation-none strided plain"
BF16, FP16 = torch.bfloat16, torch.float16
FEW_ROW_DIMS = {64: BF16, 80: FP16, 96: BF16, 128: BF16, 192: FP16, 256: FP16}
FEW_ROW_CASES = [
    dataclasses.replace(case, name=f"{case.name}-D{dim}", dim=dim, value_dim=128 if dim == 192 else 0, dtype=dtype)
    for dim, dtype in FEW_ROW_DIMS.items()
    for case in CASES
    if case.name in (FEW_ROWS.split() if dim == 128 else "T33 T4097 G8 mask-bool only-exact".split())
]
FEW_ROW_CASES += [
    dataclasses.replace(case, dim=dim, dtype=FEW_ROW_DIMS[dim], name=f"{case.name}-D{dim}")
    for dim in (64, 80, 96, 128)
    for case in [
        # In the emulator: clusters of eight CTAs and of four, a CTA alone, parts that are combined by a second launch.
        Case("of-eight", tokens=5000, exact=132, heads=1, group=4),
        Case("of-eight-rows", tokens=4200, exact=300, heads=1, group=8, mask="float", sink_logits=True),
        Case("of-four", tokens=3001, exact=40, group=3, softcap=5.0, start=300),
        Case("of-four-rows", tokens=2500, exact=500, heads=1, group=16),
        Case("alone", tokens=1100, batch=3, group=4, mask="bool"),
        Case("alone-rows", tokens=1100, batch=3, group=4, queries=2),
        Case("combined", tokens=1700, exact=100, batch=2, group=4),
        Case("combined-rows", tokens=1700, exact=260, batch=2, group=7, mask="heads"),
        # The kernel for short contexts of few heads: CTAs with two tiles, one or none, warps with two steps of exact
        # tokens, one or none.
        Case("small", tokens=1900, exact=132, heads=1, group=4),
        Case("small-full", tokens=2048, exact=256, heads=1, group=8, sink_logits=True),
        Case("small-rows", tokens=2000, exact=380, heads=1, group=8, mask="float"),
        Case("small-start", tokens=1001, exact=150, heads=1, group=3, softcap=5.0, start=300),
        Case("small-one", tokens=100, exact=0, num_sinks=0, heads=1, group=3, queries=2, mask="dead"),
        Case("small-queries", tokens=700, exact=33, heads=1, group=2, queries=3, mask="bool"),
    ]
]
# Codes of every kernel: bits that keys and values have together, with up to four rows and with more.
FEW_ROW_CASES += [
    Case(f"{name}-{k}{v}-G{group}-D{dim}", bits=(k, v), dim=dim, dtype=FEW_ROW_DIMS[dim], group=group, **fields)
    for k, v, dim in ((2, 2, 64), (2, 2, 128), (4, 4, 64), (4, 4, 128), (4, 3, 64), (4, 3, 128))
    for name, fields in (
        ("small", dict(tokens=700, heads=1)),
        ("short", dict(tokens=333, exact=0, num_sinks=0)),
        ("long", dict(tokens=2100, start=130)),
    )
    for group in (3, 7)
]
# Head dims whose kernel of more than four rows has no room in registers: several tiles a warp, the last one cut.
FEW_ROW_CASES += [
    Case(f"{name}-{bits}{bits}-{label}", bits=(bits, bits), group=group, **dims, **fields)
    for bits in (2, 3, 4)
    for label, dims in (
        ("D192", dict(dim=192, value_dim=128, dtype=FP16)),
        ("D256", dict(dim=256, dtype=FP16)),
        ("D256-bf16", dict(dim=256, dtype=BF16)),
    )
    for name, group, fields in (
        ("tiles", 8, dict(tokens=2950, batch=2)),
        ("tiles-mask", 5, dict(tokens=2300, batch=4, heads=1, start=140, mask="float", softcap=9.0)),
    )
]
FEW_ROW_CASES += [Case("body-and-long-exact", tokens=1700, exact=1100, dim=128, dtype=torch.bfloat16)]
# Exact tokens alone and few: a warp for 16 of them, up to 320 (head dims up to 128), 256 (192) or 192 (256).
NEAR = Case("near", tokens=0, exact=132, heads=2, group=4, dim=128, dtype=torch.bfloat16)
NEAR_CASES = [
    dataclasses.replace(NEAR, name=f"near-{name}", **fields)
    for name, fields in [
        *((f"E{n}", dict(exact=n)) for n in (4, 15, 16, 17, 132, 144, 145, 300, 320, 321)),
        *((f"D{d}-E{n}", dict(dim=d, exact=n, dtype=torch.float16)) for d in (64, 80, 96, 128) for n in (30, 132, 320)),
        *((f"D256-E{n}", dict(dim=256, exact=n, dtype=torch.float16)) for n in (30, 132, 192, 193)),
        *((f"D192-E{n}", dict(dim=192, value_dim=128, exact=n)) for n in (30, 132, 256, 257)),
        *((f"G{g}", dict(group=g, exact=145)) for g in (1, 2, 3, 5, 8, 16)),
        *((f"M{m}-D{d}", dict(queries=m, group=2, dim=d, exact=50)) for m in range(1, 9) for d in (64, 128)),
        *((f"{m}-D80", dict(mask=m, queries=3, batch=2, dim=80)) for m in ("bool", "float", "heads", "dead")),
        *((m, dict(mask=m, queries=3, batch=2)) for m in ("bool", "float", "heads", "dead", "row", "column", "ones")),
        ("one", dict(exact=1, num_sinks=0)),
        ("no-sinks", dict(num_sinks=0, mask="float", group=5)),
        ("softcap", dict(softcap=5.0, size=3.0, queries=2)),
        ("softcap-float", dict(softcap=5.0, mask="float", group=8)),
        ("sink-logits", dict(sink_logits=True, queries=2)),
        ("sink-logits-dead", dict(sink_logits=True, mask="dead", exact=20)),
        ("sink-logits-rows", dict(sink_logits=True, group=7, softcap=20.0, mask="bool", strided=True)),
        ("nothing", dict(exact=0, num_sinks=0)),
        ("nothing-sink-logits", dict(exact=0, num_sinks=0, sink_logits=True, group=8)),
        ("strided", dict(strided=True, queries=5, batch=2)),
        ("bits", dict(bits=(4, 2), dtype=torch.float16)),
        ("plain", dict(plain=True, batch=3)),
        ("large", dict(size=8.0)),
    ]
]  # fmt: skip
# Too large for the emulator: on a card with room for some 264 CTAs, eight clusters of eight, clusters of two, CTAs alone.
CARD_CASES = [
    dataclasses.replace(case, dim=128, name=f"{case.name}-D128", dtype=torch.bfloat16)
    for case in [
        Case("card-small", heads=8, tokens=2048, exact=132, group=4),
        Case("card-small-rows", heads=8, tokens=1500, exact=250, group=8, mask="float", sink_logits=True),
        Case("card-two", batch=16, heads=8, tokens=1200, exact=132, group=4),
        Case("card-two-rows", batch=16, heads=8, tokens=1200, exact=40, group=6),
        Case("card-alone", batch=16, heads=16, tokens=700, exact=132, group=2),
        Case("card-alone-rows", batch=16, heads=16, tokens=700, exact=132, group=5),
    ]
]
CARD_CASES += [
    Case(f"card-tiles-{bits}{bits}-D256", bits=(bits, bits), batch=16, heads=8, tokens=3000, group=8, dim=256, dtype=BF16)
    for bits in (2, 3, 4)
]
