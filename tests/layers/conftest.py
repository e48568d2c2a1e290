"""Set up Triton's interpreter where the tests run in it."""

from __future__ import annotations

import os
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy_2(tensor: Any, scope: Any) -> None:
        # Triton 3.6 takes int() of an array of one element for loop bounds, which NumPy 2.4 refuses.
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_for_numpy_2
