"""Makes FP8 calibrations: a policy answers observations as ever, and notes how large the inputs of its products become.

The largest absolute value counts, not a percentile: e4m3's relative error does not depend on the scale, so that a larger one
costs nothing within its range, and nothing is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from torch import Tensor

from stretto.core.errors import ConfigError
from stretto.core.plan import whole
from stretto.core.policy import RequestOptions
from stretto.deploy.policy import Policy, load
from stretto.deploy.policy_options import PolicyOptions
from stretto.deploy.precision import Calibration, Kind, fingerprint
from stretto.models.pi0 import Pi0Model
from stretto.models.pi0_fp8 import observed
from stretto.runtime.engine import Engine


class Observing:
    """A model that notes its products' inputs while it runs, for as long as this is entered."""

    def __init__(self, model: Pi0Model) -> None:
        """Make one.

        Raises:
            ConfigError: if the model offers `vjp`: where gradients are kept, products run past who notes their inputs.
        """
        if "vjp" in model.rtc_modes:
            raise ConfigError("rtc", got=list(model.rtc_modes), expected="no vjp while a calibration is made")
        self.model = model
        self._view, self._noted = observed(model.module)

    def __enter__(self) -> Self:
        self.model.run_on(self._view)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.model.run_on(self.model.module)

    def forget(self) -> None:
        self._view.refresh()

    def calibration(self, kind: Kind, observations: int) -> Calibration:
        """Return what was noted.

        Raises:
            ConfigError: naming a layer whose input was not a finite number, or that nothing went through.
        """
        model, input_max = self.model, {name: float(layer.largest) for name, layer in self._noted.items()}
        calibration = Calibration(model.name, fingerprint(model), kind, observations, model.config.denoise_steps, input_max)
        calibration.check()
        return calibration


class Observer:
    """A policy that notes its products' inputs while it answers. Build, `warm`, ask `policy`, take the calibration, close."""

    def __init__(self, checkpoint: str | Path, options: PolicyOptions) -> None:
        options = replace(options, precision="dtype", mode="eager", plan="whole", max_batch=1, rtc=())
        self._loaded, self._options = load(checkpoint, options), options
        self.path = self._loaded.path
        self._observing = Observing(self._loaded.model)
        self._observing.__enter__()
        self.policy = Policy(self._loaded, options)

    def warm(self) -> None:
        self.policy.warm()
        self._observing.forget()  # warming ran on whatever lay in memory

    def close(self) -> None:
        self.policy.close()

    def calibration(self, kind: Kind, observations: int) -> Calibration:
        return self._observing.calibration(kind, observations)

    def answer(self, observations: Iterable[Mapping[str, object]], kind: Kind) -> Calibration:
        """Answer observations, each with noise of its own, and return the calibration."""
        count = 0
        for count, observation in enumerate(observations, 1):
            self.policy.infer(observation, RequestOptions(seed=count))
        return self.calibration(kind, count)

    def run_random(self, count: int) -> Calibration:
        run_rows(self.policy.engine, self._loaded.model.example_inputs(count))
        return self.calibration("synthetic", count)


def calibrate_at_random(model: Pi0Model, device: str, count: int = 4) -> Calibration:
    """Calibrate a model on random pixels, tokens and noise: enough to time it. Chunks do not continue others."""
    plain = Pi0Model(model.config, model.module, model.pixels)
    with Observing(plain) as observing:
        engine = Engine(plain, whole(plain.route, device, mode="eager"))
        engine.warm()
        observing.forget()
        try:
            run_rows(engine, plain.example_inputs(count))
        finally:
            engine.close()
        return observing.calibration("synthetic", count)


def run_rows(engine: Engine, inputs: Mapping[str, Tensor]) -> None:
    """Run every row of the inputs through the whole route, one at a time."""
    stream = engine.open()
    for i in range(len(inputs["x"])):
        row = {name: value[i].numpy() for name, value in inputs.items()}
        stream.submit(row, lengths={"prompt": int(inputs["token_count"][i])}).result()
    stream.close()


def read_observations(path: Path) -> Iterator[dict[str, object]]:
    """Yield the observations of an `.npz` file: one array a key, whose first axis counts observations; texts as strings.

    Raises:
        ConfigError: if the file cannot be read, or its arrays do not count alike.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError) as e:
        raise ConfigError("observations", got=f"{path}: {e}", expected="an .npz file of arrays") from e
    counts = {name: value.shape[0] if value.ndim else 0 for name, value in arrays.items()}
    if not counts or len(set(counts.values())) != 1 or not next(iter(counts.values())):
        raise ConfigError("observations", got=counts, expected="arrays whose first axes count the same observations, 1 or more")
    for i in range(next(iter(counts.values()))):
        yield {name: str(value[i]) if value.dtype.kind == "U" else value[i] for name, value in arrays.items()}
