# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``python -m te_dispatch.cli``, for environments whose scripts are not on the path."""

from te_dispatch.cli import main

if __name__ == "__main__":
    main()
