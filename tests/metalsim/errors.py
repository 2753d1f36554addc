"""What the emulator reports; a shader that does not compile is a ``SyntaxError`` too, as in torch."""


class MetalError(RuntimeError):
    """A rule of Metal or of ``torch.mps.compile_shader`` is broken, or a run showed a bug."""


class MetalSyntaxError(SyntaxError, MetalError):
    """clang rejects the source."""


class MetalValueError(ValueError, MetalError):
    """A threadgroup larger than its kernel allows."""
