"""Where a checkpoint keeps each expert: transformers' own loading rules, turned into byte ranges.

transformers loads experts that are stored one by one through a conversion that stacks and joins them. Those conversions
that only move bytes are followed here, so that the checkpoint can be read in place.
"""

import json
import os
import re
from collections import defaultdict

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming, rename_source_key

from .file_store import FileStore, FusedTensor, Pieces, SplitTensors
from .safetensors_header import StoredTensor, read_header
from .spec import ExpertSpec

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def checkpoint_files(folder: str) -> list[str]:
    """The safetensors files of a checkpoint.

    Raises:
        FileNotFoundError: there are none, or one that the index names is missing.
    """
    names = [SINGLE]
    if os.path.exists(index := os.path.join(folder, INDEX)):
        with open(index) as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    paths = [os.path.join(folder, name) for name in names]
    if missing := [path for path in paths if not os.path.exists(path)]:
        raise FileNotFoundError(f"path must hold a safetensors checkpoint: {missing[0]} is missing")
    return paths


def checkpoint_tensors(folder: str) -> dict[str, StoredTensor]:
    """Where all tensors of a checkpoint lie.

    Raises:
        FileNotFoundError: as :func:`checkpoint_files`. ValueError: a file that is truncated.
    """
    return {name: tensor for path in checkpoint_files(folder) for name, tensor in read_header(path).items()}


def checkpoint_store(
    model: nn.Module, stored: dict[str, StoredTensor], specs: dict[str, ExpertSpec], counts: dict[str, int], io: str
) -> FileStore:
    """A store that reads the experts of ``model`` out of its checkpoint.

    Args:
        stored: the checkpoint's tensors.
        specs, counts: by layer, what one expert is made of and how many there are.
        io: as ``FileStore``.

    Raises:
        NotImplementedError: a conversion that does more than move bytes. ValueError: a parameter is not in the checkpoint.
    """
    rules = get_model_conversion_mapping(model)
    wanted = {f"{layer}.{name}": (layer, name) for layer, spec in specs.items() for name in spec.names}
    sources = match_keys(model, list(stored), rules, list(wanted))
    converters = {pattern: rule for rule in rules if isinstance(rule, WeightConverter) for pattern in rule.source_patterns}
    pieces: dict[str, dict[str, Pieces]] = defaultdict(dict)
    for full, (layer, name) in wanted.items():
        by_pattern = sources.get(full)
        if not by_pattern:
            raise ValueError(f"path must hold the weights of the model: {full} is in none of its files")
        if None in by_pattern:
            pieces[layer][name] = FusedTensor(stored[by_pattern[None][0]])
            continue
        converter = converters[next(iter(by_pattern))]
        check_conversion(full, converter)
        columns = [by_pattern[pattern] for pattern in converter.source_patterns if pattern in by_pattern]
        if any(len(column) != counts[layer] for column in columns):
            raise ValueError(f"path: {full} needs {counts[layer]} experts, found {[len(column) for column in columns]}")
        pieces[layer][name] = SplitTensors([[stored[key] for key in row] for row in zip(*columns)])
    return FileStore("the checkpoint", dict(pieces), specs, counts, io)


def match_keys(model: nn.Module, keys: list[str], rules: list, wanted: list[str]) -> dict[str, dict[str | None, list[str]]]:
    """For each parameter wanted: pattern of the conversion that makes it (``None``: no conversion) to its keys, in order."""
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    known = dict.fromkeys(wanted)
    found: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key in sorted(keys, key=natural):
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if target in known:
            found[target][pattern].append(key)
    return found


def natural(key: str) -> list:
    """Sorts ``experts.10`` after ``experts.9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", key)]


def check_conversion(full: str, converter: WeightConverter) -> None:
    """Refuses what is not experts stacked, each of parts joined along their first dim."""
    operations = converter.operations
    stacked = type(operations[0]) is MergeModulelist and operations[0].dim == 0
    joined = len(operations) == 1 or (len(operations) == 2 and type(operations[1]) is Concatenate and operations[1].dim == 1)
    if not (stacked and joined):
        names = [type(operation).__name__ for operation in operations]
        raise NotImplementedError(
            f"path: {full} is converted by {names} at load, so it cannot be read in place; load the model with "
            "from_pretrained(device_map=expert_device_map(model_on_meta), offload_folder=...) and call offload_experts on it"
        )
