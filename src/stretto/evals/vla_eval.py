"""Serve a checkpoint to the benchmarks of vla-eval (LIBERO, SimplerEnv, CALVIN and others), through our own engine.

vla-eval brings the harness, the simulators and its wire protocol; this class only translates its observations. Its
batches go to the engine as they are. With vla-eval installed, a server script is two lines:

    from vla_eval.model_servers.serve import run_server
    from stretto.evals.vla_eval import StrettoModelServer; run_server(StrettoModelServer)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stretto.core.errors import ConfigError, ObservationError
from stretto.deploy.policy import PolicyOptions, load_policy

try:
    from vla_eval.model_servers.predict import PredictModelServer
except ImportError as e:
    raise ConfigError("vla_eval", got=f"not installed ({e.name})", expected="the harness", hint="pip install vla-eval") from e

CAMERAS = {"agentview": "observation/image", "wrist": "observation/wrist_image"}
"""LIBERO's cameras, under the names of openpi's LIBERO policies."""


class StrettoModelServer(PredictModelServer):  # type: ignore[misc]
    """A checkpoint on the engine of this process.

    Args:
        checkpoint: folder or name of a policy checkpoint.
        cameras: the benchmark's camera -> the policy's image key.
        state_key: the policy's key for the benchmark's state; empty if the policy takes none.
        prompt_key: the policy's key for the task description.
        preset: the policy's key map, as in `PolicyOptions`.
        chunk_size: actions used of each chunk.
        max_batch_size: most robots in one batch.

    Raises:
        CheckpointError: if the checkpoint cannot be used.
    """

    def __init__(
        self,
        checkpoint: str,
        *,
        cameras: Mapping[str, str] | None = None,
        state_key: str = "observation/state",
        prompt_key: str = "prompt",
        preset: str | None = None,
        chunk_size: int | None = None,
        max_batch_size: int = 16,
        max_wait_time: float = 0.01,
        device: str = "auto",
        dtype: str = "auto",
    ) -> None:
        super().__init__(chunk_size=chunk_size, max_batch_size=max_batch_size, max_wait_time=max_wait_time)
        self._cameras = dict(cameras or CAMERAS)
        self._state_key, self._prompt_key = state_key, prompt_key
        self.policy = load_policy(
            checkpoint, PolicyOptions(device=device, dtype=dtype, max_batch=max_batch_size, preset=preset)
        )
        self.policy.warm()
        if chunk_size is None:
            self.chunk_size = self.policy.processor.action_horizon

    def predict_batch(self, obs_batch: list[dict[str, Any]], ctx_batch: list[Any]) -> list[dict[str, Any]]:
        """Answer several benchmark observations at once, in their order."""
        return [{"actions": reply["actions"]} for reply in self.policy.infer_batch([self.translate(o) for o in obs_batch])]

    def translate(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a benchmark's observation under the policy's keys.

        Raises:
            ObservationError: if it lacks a camera or the state.
        """
        images = obs.get("images", {})
        missing = [camera for camera in self._cameras if camera not in images]
        if missing:
            raise ObservationError(f"images.{missing[0]}", got=sorted(images), expected=f"cameras {sorted(self._cameras)}")
        out: dict[str, Any] = {key: images[camera] for camera, key in self._cameras.items()}
        if self._state_key:
            state = obs.get("states", obs.get("state"))
            if state is None:
                raise ObservationError("state", got=sorted(obs), expected="`states` or `state`")
            out[self._state_key] = state
        out[self._prompt_key] = obs.get("task_description", "")
        return out

    def get_observation_params(self) -> dict[str, Any]:
        """Ask the benchmark for what the policy reads."""
        return {"send_wrist_image": len(self._cameras) > 1, "send_state": bool(self._state_key)}

    def get_action_spec(self) -> dict[str, Any]:
        """Declare nothing: a checkpoint does not say which convention its action dimensions follow."""
        return {}

    def get_observation_spec(self) -> dict[str, Any]:
        """Declare nothing, for the same reason."""
        return {}
