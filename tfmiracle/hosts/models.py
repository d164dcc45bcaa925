"""A whole Keras model whose weights are variational."""

import os

import keras

from tfmiracle.codec.prior import PRIORS, Prior
from tfmiracle.codec.rules import Treatment, treat
from tfmiracle.coding.coder import CODERS, Coder
from tfmiracle.hosts.describe import configuration
from tfmiracle.hosts.layers import VariationalLayer
from tfmiracle.hosts.scope import is_substituted, refuse_rematerialization, substitute
from tfmiracle.keras_internals import (
    children,
    has_losses,
    walk,
)
from tfmiracle.options import check_option
from tfmiracle.posteriors.block_posterior import BlockPosterior, posterior_over
from tfmiracle.posteriors.parameterization import PARAMETERIZATIONS, Parameterization
from tfmiracle.recipe import DEFAULTS, Recipe, coder_of


@keras.saving.register_keras_serializable("tfmiracle")
class VariationalModel(keras.Model):
    """Makes the weights of a Keras model variational, without changing its layers.

    All coded weights of the model share one sequence of blocks, each with the same
    information budget, so that training decides which layers the bits go to. A forward
    pass samples all weights once and runs `net` on them; with `training=False` it uses
    the mean of Q. Blocks that are coded have their decoded values in both.

    Compile, fit, evaluate, save and load it like any Keras model. `net` keeps values of
    its own for the coded weights, which play no part until `materialize` overwrites
    them; its other weights are those of this model, and train with it.

    Args:
      net: a built Keras model. Its present weights are where the posterior starts.
      parameterization: "mean_kl" (Lin et al. 2023), "mean_var" (Havasi et al. 2019), or
        "deterministic" for the same network without noise and budget, to prepare a
        warm start; or an object that says more, such as `MeanKL(quota_rate=1.0)`.
      block_size, block_bits, kl_bits, codebook, state_bits, selection: see
        `Recipe`.
      coder: a `Coder`, which says bits, codebook and selection itself, or the name of
        one, which takes those given here.
      prior: a `Prior`, or the name of one.
      rules: pattern of a variable's path -> how it is treated, for example
        `{"conv2/kernel": "hash=2", "*/bias": "store=float16"}`. By default what trains
        is coded, statistics of BatchNormalization are stored with 8 bits, and the rest
        as it is. A trainable variable that is stored is trained as usual. See
        `tfmiracle.codec.rules.Treatment`.
      warm_start: whether `net` is trained; see `BlockPosterior.initialize`.
      log_scale, warm_log_scale, log_scale_rate: see `Recipe`.
      l2: weight of the sum of squares of the coded variables' values, those of the
        sample, in the loss; a weight that entries share counts in each. In training
        only; a `kernel_regularizer` of a layer of `net` sees samples, too, and counts
        in evaluation, as Keras has it. The `l2` of a `VariationalModel` inside another
        plays no part.
      seed: unsigned 64-bit integer; layout, codebook and training noise depend on it.
      treatments: path and treatment of each weight of `net`; by default `rules` give
        them. A saved model needs it, since Keras gives the weights of a loaded `net`
        other paths.

    Raises:
      ValueError: if `net` is not built, has nothing to code or a `train_step` or
        `compute_loss` of its own, a pattern fits nothing or stores what has a
        posterior of its own in `net`, or an argument is out of range.
    """

    def __init__(
        self,
        net: keras.Model,
        parameterization: str | Parameterization = DEFAULTS.parameterization,
        *,
        block_size: int = DEFAULTS.block_size,
        block_bits: float = DEFAULTS.block_bits,
        kl_bits: float | None = DEFAULTS.kl_bits,
        coder: str | Coder = DEFAULTS.coder,
        codebook: str = DEFAULTS.codebook,
        state_bits: int = DEFAULTS.state_bits,
        selection: str = DEFAULTS.selection,
        prior: str | Prior = DEFAULTS.prior,
        rules: dict[str, str] | None = None,
        warm_start: bool = DEFAULTS.warm_start,
        log_scale: float = DEFAULTS.log_scale,
        warm_log_scale: float = DEFAULTS.warm_log_scale,
        log_scale_rate: float = DEFAULTS.log_scale_rate,
        l2: float = DEFAULTS.l2,
        seed: int = DEFAULTS.seed,
        treatments: list[tuple[str, str]] | None = None,
        **kwargs,
    ):
        check_model(net, "net")
        # Inputs reach `net` as they are, which casts them as it does by itself.
        # By its dtype policy `compile` decides whether the loss has to be scaled.
        kwargs.setdefault("dtype", getattr(net, "dtype_policy", None))
        super().__init__(autocast=False, **kwargs)
        if not net.built:
            raise ValueError(
                f"`net` ({net.name!r}) has no weights yet. Build it first: give it an "
                "Input, call it on data, or call `net.build(input_shape)`."
            )
        refuse_rematerialization(net)
        _refuse_own_training(net)
        configuration(net)  # raises, long before anything is coded or saved
        check_option(Recipe, "l2", l2)
        self.net = net
        self.l2 = float(l2)
        weights = plain_weights(net)
        if treatments is None:
            paths = [v.path for v in weights]
            codable = set(map(id, codable_variables(net)))
            statistics = statistics_ids(net)
            treated = treat(
                paths,
                [id(v) in codable for v in weights],
                rules,
                [id(v) in statistics for v in weights],
            )
        else:
            paths, texts = zip(*treatments)
            treated = [Treatment.parse(text) for text in texts]
        if len(treated) != len(weights):
            raise ValueError(
                f"`treatments` must have an entry for each weight of `net`, "
                f"{len(weights)}. Received: {len(treated)}"
            )
        parameterization = PARAMETERIZATIONS.get(parameterization)
        coder = coder_of(
            coder,
            block_bits=block_bits,
            codebook=codebook,
            state_bits=state_bits,
            selection=selection,
        )
        prior = PRIORS.get(prior)
        options = {
            "block_size": block_size,
            "kl_bits": kl_bits,
            "log_scale": log_scale,
            "log_scale_rate": log_scale_rate,
            "seed": seed,
        }
        self._config = options | {
            "parameterization": PARAMETERIZATIONS.serialize(parameterization),
            "coder": CODERS.serialize(coder),
            "prior": PRIORS.serialize(prior),
            "l2": self.l2,
            "rules": dict(rules or {}),
            "treatments": [(p, str(t)) for p, t in zip(paths, treated)],
        }
        coded = [
            (v, path, t)
            for v, path, t in zip(weights, paths, treated, strict=True)
            if not t.stored
        ]
        if not coded:
            raise ValueError(
                f"`net` ({net.name!r}) has no trainable weights that could be coded."
            )
        ruled = ids_under_posteriors(net)
        for v, path, treatment in zip(weights, paths, treated, strict=True):
            if treatment.stored and id(v) in ruled:
                raise ValueError(
                    f"`rules` store {path!r}, which has a posterior of its own in "
                    "`net`. Use the plain layer there."
                )
        # Not the variables, which Keras would save twice.
        self._coded = frozenset(id(v) for v, _, _ in coded)
        self.rules = dict(rules or {})
        self.stored_dtypes = [t.dtype for t in treated if t.stored]
        self.block_posterior = posterior_over(
            [v for v, _, _ in coded],
            parameterization,
            coder=coder,
            prior=prior,
            hash_factors=[t.hash_factor for _, _, t in coded],
            scale_groups=[
                path if t.own_scale else path.rpartition("/")[0] for _, path, t in coded
            ],
            warm_start=warm_start,
            warm_log_scale=warm_log_scale,
            **options,
        )
        # Everything that does not train: the raw weights that samples stand in for,
        # and the posteriors of layers that now share the blocks of this model.
        idle = [v for inner, _ in posteriors(net) for v in inner.variables]
        self._idle = self._coded.union(map(id, idle))
        self.built = True

    def build(self, input_shape=None):
        pass

    def call(self, inputs, training=None):
        variables = self.coded_variables
        if all(is_substituted(v) for v in variables):
            return self.net(inputs, training=training)
        values = self.block_posterior(training=training)
        if (
            training and self.l2 and not has_losses(self)
        ):  # once a step, as the KL penalty
            squares = [keras.ops.sum(keras.ops.square(value)) for value in values]
            self.add_loss(self.l2 * sum(squares))
        with substitute(self, variables, values):
            return self.net(inputs, training=training)

    @property
    def output_names(self) -> list[str] | None:
        """Names of the outputs of `net`, by which `compile` takes losses."""
        return getattr(self.net, "output_names", None)

    @property
    def coded_variables(self) -> list[keras.Variable]:
        """The variables of `net` that are coded, in its order."""
        return [v for v in plain_weights(self.net) if id(v) in self._coded]

    @property
    def posterior(self):
        """Q as a TFP distribution, see `BlockPosterior.distribution`."""
        return self.block_posterior.distribution

    @property
    def prior(self):
        """The coding distribution P as a TFP distribution, laid out like Q."""
        return self.block_posterior.coding_distribution

    def materialize(self, sample: bool = False) -> keras.Model:
        """Writes weights of the posterior into `net`.

        Args:
          sample: see `BlockPosterior.values`.

        Returns:
          `net`.
        """
        values = self.block_posterior.values(sample)
        for variable, value in zip(self.coded_variables, values, strict=True):
            variable.assign(value)
        return self.net

    def export(self, *args, **kwargs):
        """Exports `net` with the weights that inference uses, see `materialize`."""
        return self.materialize().export(*args, **kwargs)

    # `fit`, `summary` and the optimizer ask these four what trains.

    @property
    def trainable_variables(self):
        return [v for v in super().trainable_variables if id(v) not in self._idle]

    @property
    def non_trainable_variables(self):
        return self._complement(self.variables, self.trainable_variables)

    @property
    def trainable_weights(self):
        return [v for v in super().trainable_weights if id(v) not in self._idle]

    @property
    def non_trainable_weights(self):
        return self._complement(self.weights, self.trainable_weights)

    @staticmethod
    def _complement(variables, others):
        ids = {id(v) for v in others}
        return [v for v in variables if id(v) not in ids]

    def get_config(self):
        return {
            **super().get_config(),
            "net": keras.saving.serialize_keras_object(self.net),
            **self._config,
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        net = keras.saving.deserialize_keras_object(
            config.pop("net"), custom_objects=custom_objects
        )
        return cls(net, **config)


class WholeBatches(keras.Model):
    """A network of a fixed batch that takes fewer examples, too, for evaluation."""

    def __init__(self, net: keras.Model, **kwargs):
        super().__init__(**kwargs)
        self.net = net
        self.built = True

    def call(self, inputs, training=None):
        return in_whole_batches(self.net, inputs, training=training)

    @property
    def output_names(self) -> list[str] | None:
        return getattr(self.net, "output_names", None)


def in_whole_batches(model: keras.Model, inputs, training: bool | None = None):
    """The outputs of a model for up to as many examples as its batch is fixed to."""
    batch = fixed_batch(model)
    if batch is None:
        return model(inputs, training=training)
    count = keras.ops.shape(keras.tree.flatten(inputs)[0])[0]
    index = keras.ops.arange(batch) % count  # some of them again, to fill up
    whole = keras.tree.map_structure(lambda x: keras.ops.take(x, index, axis=0), inputs)
    outputs = model(whole, training=training)
    return keras.tree.map_structure(lambda y: y[:count], outputs)


def fixed_batch(model: keras.Model) -> int | None:
    """The number of examples that each batch of a model must have, if there is one."""
    if isinstance(model, VariationalModel | WholeBatches):
        return fixed_batch(model.net)
    shapes = [x.shape for x in keras.tree.flatten(getattr(model, "inputs", None) or [])]
    for layer in walk(model):
        if getattr(layer, "stateful", False):
            states = keras.tree.flatten(getattr(layer, "states", None) or [])
            shapes += [state.shape for state in states]
    return next((shape[0] for shape in shapes if shape and shape[0]), None)


def check_model(model, name: str = "model") -> None:
    """Refuses what is no Keras model, and says what to do.

    Raises:
      ValueError: if it is none.
    """
    if isinstance(model, keras.Model):
        return
    modules = {cls.__module__.partition(".")[0] for cls in type(model).__mro__}
    if isinstance(model, keras.Layer):
        advice = "Put the layer into a keras.Sequential."
    elif modules & {"tf_keras", "tensorflow"} and hasattr(model, "get_weights"):
        advice = (
            "It is of Keras 2 (tf_keras). Build the same network with Keras 3 "
            "(`import keras`) and give it `get_weights()` of this one."
        )
    elif isinstance(model, str | os.PathLike):
        advice = "Load it first: `keras.saving.load_model(path)`."
    elif "torch" in modules:
        advice = "Build the same network with Keras and copy the weights."
    else:
        advice = "Pass what `keras.Sequential` or `keras.Model(inputs, outputs)` gives."
    what = model.__name__ if isinstance(model, type) else type(model).__name__
    raise ValueError(f"`{name}` must be a Keras model. {advice} Received: {what}")


def _refuse_own_training(net):
    for name in ("train_step", "test_step", "compute_loss", "compute_metrics"):
        own = name in vars(net)
        if own or getattr(type(net), name) is not getattr(keras.Model, name):
            raise ValueError(
                f"{type(net).__name__} has a `{name}` of its own, which training under "
                "a posterior would not use. Say what to minimize with losses given to "
                "`compile` and with `add_loss`."
            )


def codable_variables(net: keras.Model) -> list[keras.Variable]:
    """The trainable floating-point weights of a model, in its order.

    Those of variational layers are their kernels and biases, not their posteriors.
    """
    covered = ids_under_posteriors(net)
    return [
        v
        for v in plain_weights(net)
        if (v.trainable or id(v) in covered) and "float" in v.dtype
    ]


def plain_weights(model: keras.Model) -> list[keras.Variable]:
    """The weights of the network without its posteriors, in its order."""
    if isinstance(model, VariationalModel):
        return plain_weights(model.net)
    hidden = {
        id(v)
        for layer in walk(model)
        if isinstance(layer, BlockPosterior)
        for v in layer.weights
    }
    return [v for v in model.weights if id(v) not in hidden]


def posteriors(
    model: keras.Layer,
) -> list[tuple[BlockPosterior, list[keras.Variable]]]:
    """The posteriors that rule weights of a model, each with its variables.

    One for a `VariationalModel`, one for each variational layer of another model.
    """
    if isinstance(model, VariationalModel | VariationalLayer):
        return [(model.block_posterior, model.coded_variables)]
    found = {}
    for layer in children(model):
        found.update((id(part[0]), part) for part in posteriors(layer))
    return list(found.values())


def statistics_ids(model: keras.Model) -> set[int]:
    """`id` of every statistic that a BatchNormalization takes of its inputs.

    Not of frozen ones, which are constants.
    """
    return {
        id(v)
        for layer in walk(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        for v in (layer.moving_mean, layer.moving_variance)
    }


def ids_under_posteriors(model: keras.Layer) -> set[int]:
    """`id` of every variable that a posterior rules, see `posteriors`."""
    return {id(v) for _, variables in posteriors(model) for v in variables}
