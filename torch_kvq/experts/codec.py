"""The packed format of routed experts: 2, 3, 4 or 8 bits a weight and one scale and zero for each group of 64.

An expert's parameter is flattened and padded with its last value to whole groups. A code ``q`` stands for
``q * scale + zero``, scale and zero in bfloat16: ``bits + 32 / 64`` bits a weight. The bits of a code are split into fields
of 1, 2, 4 or 8 bits (3 bits: the low 2, then the high 1). A field of ``w`` bits has ``per = 8 / w`` codes in a byte: byte
``j`` of ``n / per`` holds the codes ``j, j + n / per, ...``, the first in its lowest bits, so that decoding writes whole
runs. The fields lie one after the other.
"""

from dataclasses import dataclass

import torch

FIELDS = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
SHRINKS = {2: (1.0, 0.8, 0.7, 0.6, 0.5), 3: (1.0, 0.9, 0.8, 0.7), 4: (1.0, 0.95, 0.9, 0.8), 8: (1.0,)}  # of the range, to try


@dataclass(frozen=True)
class ExpertCodec:
    """Group-wise uniform codes.

    Args:
        bits: 2, 3, 4 or 8.
        group_len: weights that share scale and zero, a multiple of 8.

    Raises:
        ValueError: another value, named.
    """

    bits: int
    group_len: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or self.bits not in FIELDS:
            raise ValueError(f"bits must be one of {list(FIELDS)}, got {self.bits!r}")
        if self.group_len < 8 or self.group_len % 8:
            raise ValueError(f"group_len must be a multiple of 8, got {self.group_len}")

    def num_groups(self, num_weights: int) -> int:
        return -(-num_weights // self.group_len)

    def num_bytes(self, num_weights: int) -> int:
        """Bytes of codes, scales and zeros."""
        groups = self.num_groups(num_weights)
        return groups * (self.group_len * self.bits // 8 + 4)

    def encode(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """``codes`` uint8, ``scale`` and ``zero`` bfloat16 of a tensor of any shape.

        Of several narrowed ranges each group takes the one of least squared error.
        """
        groups = self._groups(weights)
        low, high = groups.amin(1), groups.amax(1)
        best = None
        for shrink in SHRINKS[self.bits]:
            half = (high - low) / 2 * shrink
            scale = (2 * half / (2**self.bits - 1)).bfloat16()
            scale = torch.where(scale > 0, scale, torch.ones_like(scale))
            zero = ((low + high) / 2 - half).bfloat16()
            codes = (groups - zero.float()[:, None]).div_(scale.float()[:, None]).round_().clamp_(0, 2**self.bits - 1)
            error = torch.addcmul(zero.float()[:, None] - groups, codes, scale.float()[:, None]).square_().sum(1)
            trial = (error, codes.to(torch.uint8), scale, zero)
            if best is not None:
                better = error < best[0]
                trial = [torch.where(better.view(-1, *[1] * (new.dim() - 1)), new, old) for new, old in zip(trial, best)]
            best = trial
        _, codes, scale, zero = best
        return {"codes": self._pack(codes.flatten()), "scale": scale, "zero": zero}

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out``, contiguous and of any floating dtype, with the weights; computed in float32."""
        levels = self._unpack(codes, len(scale) * self.group_len).view(len(scale), self.group_len).float()
        weights = torch.addcmul(zero.float()[:, None], levels, scale.float()[:, None])
        out.view(-1).copy_(weights.view(-1)[: out.numel()])

    def _groups(self, weights: torch.Tensor) -> torch.Tensor:
        flat = weights.reshape(-1).float()
        missing = self.num_groups(len(flat)) * self.group_len - len(flat)
        return torch.cat([flat, flat[-1:].expand(missing)]).view(-1, self.group_len)

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        fields, shift = [], 0
        for width in FIELDS[self.bits]:
            runs = ((codes >> shift) & (2**width - 1)).view(8 // width, -1)
            packed = torch.zeros_like(runs[0])
            for place, run in enumerate(runs):
                packed |= run << (place * width)
            fields.append(packed)
            shift += width
        return torch.cat(fields)

    def _unpack(self, packed: torch.Tensor, num_codes: int) -> torch.Tensor:
        if self.bits == 8:
            return packed
        codes = torch.zeros(num_codes, dtype=torch.uint8, device=packed.device)
        begin = shift = 0
        for width in FIELDS[self.bits]:
            length = num_codes * width // 8
            field = packed[begin : begin + length]
            for place, run in enumerate(codes.view(8 // width, -1)):
                run |= ((field >> (place * width)) & (2**width - 1)) << shift
            begin += length
            shift += width
        return codes
