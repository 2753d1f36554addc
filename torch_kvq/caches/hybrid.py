"""Layers that hold a linear-attention state beside keys and values in a compressed layer (Falcon-H1 and the like)."""

from transformers.cache_utils import LinearAttentionLayer

from .isoquant_layer import IsoQuantLayer
from .layer import CompressedLayer
from .rabitq_layer import RaBitQLayer


class HybridLayer(LinearAttentionLayer):
    """The states of a ``LinearAttentionLayer``, as the library keeps them, and a layer of the class ``attention``.

    Like the library's own hybrid layer it can be cropped only where no recurrent state has been written.
    """

    is_compileable = False
    attention: type[CompressedLayer]

    def __init__(self, settings, stats, index: int = 0, number_of_states: int = 1) -> None:
        self.attention.__init__(self, settings, stats, index)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args, **kwargs) -> None:
        if args:
            self.attention.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        self.attention.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        self.attention.crop(self, tokens_to_remove)

    def map_batch(self, function) -> None:
        self.attention.map_batch(self, function)
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                if state is not None:
                    states[index] = function(state)

    def reorder_cache(self, beam_idx) -> None:
        self.attention.reorder_cache(self, beam_idx)

    def activate_past_recording(self) -> None:
        LinearAttentionLayer.activate_past_recording(self)
        self.attention.activate_past_recording(self)


class IsoQuantHybridLayer(HybridLayer, IsoQuantLayer):
    attention = IsoQuantLayer


class RaBitQHybridLayer(HybridLayer, RaBitQLayer):
    attention = RaBitQLayer
