"""Headless MuJoCo rendering with one GL context: several cameras and sizes through one off-screen buffer.

Shadows, reflections and multisampling are off: on a CPU they are most of the cost, and a small policy needs none of them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.core.errors import ConfigError

PACKAGES = "libegl1 libegl-mesa0 libgl1-mesa-dri"
"""Debian and Ubuntu packages that give EGL without a GPU or a display."""


def import_mujoco() -> Any:
    """Import mujoco set up for headless EGL, unless the user's environment already chooses otherwise.

    Raises:
        ConfigError: if mujoco or the GL library it was told to use is missing; names the variable and the package.
    """
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")
        if os.environ["MUJOCO_GL"] in ("egl", "osmesa"):
            os.environ.setdefault("PYOPENGL_PLATFORM", os.environ["MUJOCO_GL"])
    try:
        import mujoco
    except ModuleNotFoundError as e:
        if e.name != "mujoco":
            raise _no_gl(e) from e
        raise ConfigError("mujoco", got="not installed", expected="the simulator", hint="pip install 'stretto[sim]'") from e
    except (ImportError, AttributeError, RuntimeError, OSError) as e:
        raise _no_gl(e) from e
    return mujoco


def _no_gl(cause: Exception) -> ConfigError:
    backend = os.environ.get("MUJOCO_GL", "")
    return ConfigError(
        "MUJOCO_GL",
        got=f"{backend!r} with PYOPENGL_PLATFORM={os.environ.get('PYOPENGL_PLATFORM', '')!r}, which cannot render ({cause})",
        expected="a headless OpenGL that works",
        hint=f"Install it (apt-get install {PACKAGES}) and set MUJOCO_GL=egl PYOPENGL_PLATFORM=egl",
    )


class Renderer:
    """Draw one model from any camera at any size up to `max_size`.

    Raises:
        ConfigError: if no GL context can be made; names the variable and the package.
    """

    def __init__(self, model: Any, max_size: int) -> None:
        self._mujoco = mujoco = import_mujoco()
        self._max_size = max_size
        model.vis.quality.shadowsize = 0
        model.vis.quality.offsamples = 0
        model.vis.global_.offwidth = model.vis.global_.offheight = max_size
        try:
            self._gl = mujoco.GLContext(max_size, max_size)
            self._gl.make_current()
            self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        except (ImportError, AttributeError, RuntimeError, OSError, mujoco.FatalError) as e:
            raise _no_gl(e) from e
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._model = model
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._options = mujoco.MjvOption()

    def render(self, data: Any, camera: Any, size: int) -> NDArray[np.uint8]:
        """Return the picture of an `MjvCamera`, [size, size, 3], top row first, in memory of its own.

        Raises:
            ConfigError: if `size` is above `max_size`.
        """
        if size > self._max_size:
            raise ConfigError("size", got=size, expected=f"at most {self._max_size}")
        mujoco = self._mujoco
        mujoco.mjv_updateScene(
            self._model, data, self._options, None, camera, mujoco.mjtCatBit.mjCAT_ALL.value, self._scene
        )  # fmt: skip
        rect = mujoco.MjrRect(0, 0, size, size)
        pixels = np.empty((size, size, 3), np.uint8)
        mujoco.mjr_render(rect, self._scene, self._context)
        mujoco.mjr_readPixels(pixels, None, rect, self._context)
        return np.ascontiguousarray(pixels[::-1])

    def close(self) -> None:
        """Free the GL context; may be called twice."""
        if self._gl is not None:
            self._context.free()
            self._gl.free()
            self._gl = None


def camera_at(lookat: Any, distance: float, azimuth: float, elevation: float) -> Any:
    """Return a camera that looks at a point (metres) from a distance and two angles (degrees)."""
    mujoco = import_mujoco()
    camera = mujoco.MjvCamera()
    camera.type = mujoco.mjtCamera.mjCAMERA_FREE
    camera.lookat[:] = lookat
    camera.distance, camera.azimuth, camera.elevation = distance, azimuth, elevation
    return camera
