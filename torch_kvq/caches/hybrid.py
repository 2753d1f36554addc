"""A layer that holds a linear-attention state beside packed keys and values (Falcon-H1 and the like)."""

from transformers.cache_utils import LinearAttentionLayer

from .layer import IsoQuantLayer


class IsoQuantHybridLayer(LinearAttentionLayer, IsoQuantLayer):
    """The states of a ``LinearAttentionLayer``, as the library keeps them, and an ``IsoQuantLayer``.

    Like the library's own hybrid layer it can be cropped only where no recurrent state has been written.
    """

    is_compileable = False

    def __init__(self, settings, stats, index: int = 0, number_of_states: int = 1) -> None:
        IsoQuantLayer.__init__(self, settings, stats, index)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args, **kwargs) -> None:
        if args:
            IsoQuantLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        IsoQuantLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        IsoQuantLayer.crop(self, tokens_to_remove)

    def map_batch(self, function) -> None:
        IsoQuantLayer.map_batch(self, function)
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                if state is not None:
                    states[index] = function(state)

    def reorder_cache(self, beam_idx) -> None:
        IsoQuantLayer.reorder_cache(self, beam_idx)

    def activate_past_recording(self) -> None:
        LinearAttentionLayer.activate_past_recording(self)
        IsoQuantLayer.activate_past_recording(self)
