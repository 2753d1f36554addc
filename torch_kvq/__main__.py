"""``python -m torch_kvq``: the commands of ``torch-kvq``."""

from .cli import main

raise SystemExit(main())
