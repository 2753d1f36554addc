"""The versions this package needs, checked before anything else is imported."""

LEAST_TORCH, LEAST_TRANSFORMERS = (2, 11), (5, 17)


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def check_requirements() -> None:
    """Raises ``ImportError`` that names the package, the rule and the version found."""
    import torch
    import transformers

    for package, least in ((torch, LEAST_TORCH), (transformers, LEAST_TRANSFORMERS)):
        if _release(package.__version__) < least:
            needed = ".".join(map(str, least))
            raise ImportError(f"torch_kvq needs {package.__name__} >={needed}, found {package.__version__}")


def cache_keyword() -> str:
    """The argument of ``model.forward`` that takes a cache: ``cache`` from transformers 5.24 on, before ``past_key_values``."""
    import transformers

    return "cache" if _release(transformers.__version__) >= (5, 24) else "past_key_values"
