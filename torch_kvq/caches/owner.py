"""Whose tokens a cache holds: those of one model, and of forwards that were finished."""

import weakref

from transformers.cache_utils import LinearAttentionLayer

from .discovery import is_in_a_model, module_of_caller
from .layer import CompressedLayer, is_plain


class Ownership:
    """Watches the calls of ``update`` of a cache class ``name`` for a second model and for forwards that failed midway.

    A forward goes through the layers upwards, so a call that does not go up begins another forward, or is a second
    attention module of the same layer (cross-attention): only then, and at first, are the calling frames looked at.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._owners: dict[int, weakref.ref] = {}
        self._last = -1
        self._is_broken = False

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_owners": {}}

    def check(self, layers: list, index: int) -> None:
        """Before layer ``index`` takes tokens, called by ``update``.

        Raises:
            ValueError: the layer holds tokens of another module than the one that calls.
        """
        if index <= self._last or index not in self._owners:
            self._check_module(layers, index, module_of_caller(3))
        self._last = index

    def _check_module(self, layers: list, index: int, module: weakref.ref | None) -> None:
        if module is None:
            return
        owner = self._owners.get(index, module)
        length = layers[index].get_seq_length() if index < len(layers) else 0
        if owner() is not module() and length:
            raise ValueError(
                f"past_key_values must serve one model: layer {index} holds {length} tokens of another attention module "
                f"than this {type(module()).__name__}. Call reset() or use a new cache; an encoder-decoder model needs "
                f"EncoderDecoderCache({self._name}(), DynamicCache())"
            )
        self._owners[index] = module

    def check_whole(self) -> None:
        if self._is_broken:
            raise ValueError(
                "past_key_values holds tokens of a forward that failed midway, and layers that are not packed (see report()) "
                "cannot take them back: call reset()"
            )

    def undo_failed_forward(self, layers: list, first: int, length: int, fresh: int) -> None:
        """Before layer ``first``, the first that is packed, takes ``fresh`` tokens in a cache of ``length``.

        A forward that raised midway left its tokens in the first layers only: packed layers give them back. Layers that
        somebody fills by hand, in an order of their own, are left as they are.

        Raises:
            ValueError: a layer that is not packed holds tokens of that forward, now and until :meth:`reset` of the cache.
        """
        failed = first < len(layers) and layers[first].get_seq_length() > length and is_in_a_model()
        for index, layer in enumerate(layers):
            if isinstance(layer, LinearAttentionLayer):
                self._is_broken |= failed
            elif not isinstance(layer, CompressedLayer):
                expected = length + fresh if index < first else length
                self._is_broken |= getattr(layer, "cumulative_length", expected) != expected
        self.check_whole()
        for layer in layers if failed else ():
            if isinstance(layer, CompressedLayer):
                layer.crop(min(length - layer.get_seq_length(), 0))

    def breaks(self, layers: list, index: int, length: int) -> bool:
        """After layer ``index`` refused its tokens: whether layers that are not packed took some of this forward.

        They keep no record of how they were before. A cache of ``length`` 0 can start over, another one is broken.
        """
        others = any(not is_plain(layer) for layer in layers[:index])
        others |= index < len(layers) and isinstance(layers[index], LinearAttentionLayer)
        self._is_broken |= others and length > 0
        return others
