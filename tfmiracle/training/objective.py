"""What a run minimizes and measures."""

import dataclasses

import keras
import tensorflow as tf

from tfmiracle.keras_internals import compiled_loss_weights
from tfmiracle.training import run
from tfmiracle.training.distillation import soft_loss


@dataclasses.dataclass(frozen=True)
class Objective:
    """Loss and metrics of every network of a run."""

    loss: object
    loss_weights: object
    metrics: object
    class_weight: dict | None

    @classmethod
    def of(cls, model, loss, metrics, class_weight, distill):
        """That of a model, unless another loss is given."""
        weights = None
        if loss is None and model.compiled:
            loss, weights = model.loss, compiled_loss_weights(model)
        if distill:
            hard = model.loss if model.compiled else None
            loss = soft_loss(hard) if loss is hard else loss
        return cls(loss, weights, metrics, class_weight)

    def check(self, net, batch, data):
        """Raises a ValueError if there is nothing to minimize, or weights clash."""
        if self.loss is None and not adds_losses(net, batch):
            raise ValueError(
                "`loss` is missing: compile the model with a loss first, pass one, or "
                "have a layer call `add_loss`."
            )
        has_weights = isinstance(data, tuple) and len(data) == 3
        if self.class_weight is not None and (self.loss is None or has_weights):
            raise ValueError(
                "`class_weight` needs labels with a `loss`, and no weights of examples."
            )

    def compile(self, network, learning_rate=1e-3):
        """Compiles a network for it, and returns it."""
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        network.compile(
            keras.optimizers.Adam(learning_rate),
            self.loss,
            loss_weights=self.loss_weights,
            metrics=self.metrics,
            # Several steps under several replicas are more than Keras can do.
            steps_per_execution=1 if replicas > 1 else run.STEPS_PER_EXECUTION,
            # With XLA where there is an accelerator. On a CPU, where it makes
            # convolutions slow, only the posterior is compiled.
            jit_compile="auto",
        )
        return network

    def settings(self):
        """It, as JSON that another process would write, too."""
        names = ("loss", "loss_weights", "metrics", "class_weight")
        return {name: describe(getattr(self, name)) for name in names}


def describe(setup):
    """What a loss or metrics are, as JSON that another process would write, too.

    Not as Keras serializes them, which many cannot be; without addresses, and without
    the names, which Keras numbers.
    """
    if isinstance(setup, dict):
        return {str(k): describe(v) for k, v in setup.items() if k != "name"}
    if isinstance(setup, list | tuple):
        return [describe(part) for part in setup]
    if setup is None or isinstance(setup, str | int | float):
        return setup if setup is None else str(setup)
    of = setup if hasattr(setup, "__qualname__") else type(setup)
    name = f"{of.__module__}.{of.__qualname__}"
    try:
        return [name, describe(dict(setup.get_config()))]
    except Exception:  # has none, or one that cannot be made
        return name


def adds_losses(net, x):
    """Whether the network has losses of its own, by `add_loss`."""
    with keras.StatelessScope(collect_losses=True) as scope:  # which changes nothing
        net(x, training=True)
    return bool(scope.losses)
