"""Experts at 2 to 8 bits in host memory, decoded into slots."""

from collections.abc import Mapping

import torch

from .codec import ExpertCodec
from .spec import ExpertSpec
from .store import ExpertStore


class PackedStore(ExpertStore):
    """Packed copies of experts of other stores. Matrices are packed; vectors (biases) stay as they are.

    Args:
        sources: where the experts come from, by layer.
        bits: by layer, 2, 3, 4 or 8.
        group_len: weights that share scale and zero.
        pin_memory: keep it page-locked, for a GPU.
    """

    kind, is_packed = "packed host memory", True

    def __init__(
        self,
        sources: Mapping[str, ExpertStore],
        bits: Mapping[str, int],
        group_len: int = 64,
        pin_memory: bool = False,
    ) -> None:
        self._specs = {layer: sources[layer].spec(layer) for layer in bits}
        self._counts = {layer: sources[layer].num_experts(layer) for layer in bits}
        self._codecs: dict[str, ExpertCodec] = {}
        self._data: dict[str, dict[str, torch.Tensor]] = {}
        self.errors: dict[str, float] = {}
        self._group_len, self._pin_memory = group_len, pin_memory
        for layer, count in bits.items():
            self.pack(layer, sources[layer], count)

    def pack(self, layer: str, source: ExpertStore, bits: int) -> None:
        """Pack a layer, again if it was packed before; sets ``errors[layer]``, relative in the Frobenius norm."""
        codec = ExpertCodec(bits, self._group_len)
        spec, data = self._specs[layer], {}
        expert, decoded = spec.empty(), spec.empty()
        off = total = 0.0
        for index in range(self._counts[layer]):
            source.read(layer, index, expert)
            for key, part in self._encode(codec, expert).items():
                if key not in data:
                    shape = (self._counts[layer], *part.shape)
                    data[key] = torch.empty(shape, dtype=part.dtype, pin_memory=self._pin_memory)
                data[key][index] = part
            self._decode(codec, {key: rows[index] for key, rows in data.items()}, decoded)
            for name, weights in expert.items():
                off += (weights.double() - decoded[name].double()).square().sum().item()
                total += weights.double().square().sum().item()
        self._codecs[layer], self._data[layer] = codec, data
        self.errors[layer] = (off / total) ** 0.5 if total else 0.0

    def bits(self, layer: str) -> int:
        return self._codecs[layer].bits

    def bits_per_weight(self, layer: str) -> float:
        """Everything counted: codes, scales, zeros, vectors."""
        weights = sum(torch.Size(shape).numel() for _, shape, _ in self._specs[layer].params)
        return 8 * self.expert_bytes(layer) / weights

    @staticmethod
    def _encode(codec: ExpertCodec, expert: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parts = {}
        for name, weights in expert.items():
            packed = codec.encode(weights) if weights.dim() > 1 else {"exact": weights}
            parts.update({f"{name}.{key}": part for key, part in packed.items()})
        return parts

    @staticmethod
    def _decode(codec: ExpertCodec, stored: Mapping[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        for name, weights in into.items():
            if weights.dim() > 1:
                codec.decode(*(stored[f"{name}.{key}"] for key in ("codes", "scale", "zero")), weights)
            else:
                weights.copy_(stored[f"{name}.exact"])

    # ---- ExpertStore

    def layers(self) -> list[str]:
        return list(self._specs)

    def spec(self, layer: str) -> ExpertSpec:
        return self._specs[layer]

    def num_experts(self, layer: str) -> int:
        return self._counts[layer]

    def expert_bytes(self, layer: str) -> int:
        return sum(rows[0].nbytes for rows in self._data[layer].values())

    def read(self, layer: str, expert: int, into: dict[str, torch.Tensor]) -> int:
        self.decode(layer, self.host_tensors(layer, expert), into)
        return self.expert_bytes(layer)

    def host_tensors(self, layer: str, expert: int) -> dict[str, torch.Tensor]:
        return {key: rows[expert] for key, rows in self._data[layer].items()}

    def decode(self, layer: str, stored: Mapping[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        self._decode(self._codecs[layer], stored, into)

    @property
    def host_bytes(self) -> int:
        return sum(rows.nbytes for data in self._data.values() for rows in data.values())
