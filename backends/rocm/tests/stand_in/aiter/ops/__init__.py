# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
