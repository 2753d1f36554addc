"""Rules that no compiler of this machine knows: what Metal or ``torch.mps.compile_shader`` does not allow."""

import re

RULES = (
    (r"\bdouble\b", "Metal has no double"),
    (r"\blong\s+long\b", "Metal has no long long"),
    (r"\b(new|delete|throw|try|catch|virtual|dynamic_cast|typeid|goto|thread_local)\b", "not in Metal"),
    (r"\bstd\s*::", "Metal has no std::"),
    (r"\bif\s+constexpr\b", "needs Metal 4; macOS 14 and 15 compile as C++14"),
    (r"function_constant\s*\(", "torch.mps.compile_shader cannot set function constants"),
    (r"\[\[\s*threadgroup\s*\(", "torch.mps.compile_shader cannot size [[threadgroup(n)]]: declare the array in the kernel"),
    (r"#\s*include\s*<(?!metal_stdlib>)", "only <metal_stdlib> is emulated"),
    (r'#\s*include\s*"', "torch.mps.compile_shader finds no project header: put the sources together"),
    (r"\bsimdgroup_(matrix|float8x8|half8x8|bfloat8x8)\b", "matrices of a simdgroup are not emulated"),
    (r"\btexture\w*<", "textures are not emulated"),
    (r"\bmsl_\w+", "names that begin with msl_ belong to the emulator"),
)


def without_comments(source: str) -> str:
    """The same lines with every comment blank."""
    source = re.sub(r"/\*.*?\*/", lambda found: re.sub(r"[^\n]", " ", found[0]), source, flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", source)


def lint(source: str) -> list[str]:
    """Findings ``line: reason``, in the order of the rules."""
    # torch converts a source by NSASCIIStringEncoding.
    found = [f"{n}: not ASCII" for n, line in enumerate(source.split("\n"), 1) if not line.isascii()]
    lines = without_comments(source).split("\n")
    return found + [f"{n}: {why}" for pattern, why in RULES for n, line in enumerate(lines, 1) if re.search(pattern, line)]
