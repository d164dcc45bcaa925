"""What `compress` takes as data: kinds, batches, and networks of a fixed batch."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfmiracle
from tfmiracle import Recipe
from tfmiracle.hosts.models import WholeBatches, fixed_batch
from tfmiracle.training.data import read_data, training_batches
from tfmiracle.training.objective import adds_losses
from tfmiracle.training.run import PHASES

X = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
Y = np.argmax(X[:, :3], 1)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
FEW = Recipe(
    train_steps=3,
    finetune_steps=0,
    batch_size=8,
    block_size=10,
    block_bits=6,
    blocks_per_round=1000,
)


def net(loss=LOSS):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([layers.Input((4,)), layers.Dense(3)])
    model.compile(loss=loss)
    return model


def compressed(tmp_path, model, data, recipe=FEW, **options):
    path = tmp_path / "net.miracle"
    return tfmiracle.compress(model, data, None, path, recipe, verbose=0, **options)


class Frame:
    """As a table of pandas: no array, but it can be made one."""

    def __init__(self, values):
        self.values = values
        self.shape = values.shape

    def __len__(self):
        return len(self.values)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


class Numbered(keras.utils.PyDataset):
    """Batches of 8 by their numbers."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = parts

    def __len__(self):
        return 5

    def __getitem__(self, i):
        return tuple(part[8 * i : 8 * i + 8] for part in self.parts)


def generated(*parts):
    while True:
        for i in range(5):
            yield tuple(part[8 * i : 8 * i + 8] for part in parts)


def batched(*parts):
    return tf.data.Dataset.from_tensor_slices(parts).batch(8)


# Arrays.


@pytest.mark.parametrize(
    "data",
    [
        [X, Y],
        (X.tolist(), Y.tolist()),
        (tuple(map(tuple, X)), tuple(Y)),
        (list(map(list, X)), list(Y)),
        (Frame(X), Frame(Y)),
        (tf.constant(X), tf.constant(Y)),
        (tf.Variable(X), Y),
        (keras.ops.array(X), Y),
        ([X], [Y]),
        (X, Y, None),
    ],
    ids=lambda data: type(data[0]).__name__,
)
def test_arrays_and_what_can_be_made_one(data):
    parts = read_data("data", data, net())
    x, y = (np.squeeze(part) for part in parts)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)
    batches = training_batches(parts, FEW)("coding", 0)
    assert [len(leaf) for leaf in tf.nest.flatten(next(iter(batches)))] == [8, 8]


def test_structures_of_arrays():
    inputs = {"a": layers.Input((4,), name="a"), "b": layers.Input((1,), name="b")}
    model = keras.Model(inputs, layers.Concatenate()([inputs["a"], inputs["b"]]))
    x = {"b": Frame(X[:, :1]), "a": X.tolist()}
    (read,) = read_data("data", x, model, labelled=False)
    assert read.keys() == {"a", "b"}
    np.testing.assert_array_equal(read["a"], X)
    np.testing.assert_array_equal(read["b"], X[:, :1])
    x = (np.zeros((3, 4)), np.zeros((3, 1)))
    read, y = read_data("data", (list(x), np.zeros(3)), model)
    assert len(read) == 2 and y.shape == (3,)


class NoArray:
    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("requires grad")


RAGGED = [[1.0, 2.0], [3.0]]
SPARSE = tf.sparse.from_dense(np.eye(40, dtype=np.float32))


@pytest.mark.parametrize(
    "data, message",
    [
        (X, "`data` must be a tuple"),
        (3.0, r"`data` must be a tuple.*Received: float"),
        ("data.npz", r"`data` must be a tuple.*Received: str"),
        (map(abs, [1]), r"`data` must be a tuple.*Received: map"),
        ({"x": X, "y": Y}, r"`data` must be a tuple.*Received: dict"),
        ((X, None), r"`data` must be a tuple.*Received: tuple of 2 \(ndarray, None"),
        ((X, Y, Y, Y), "`data` must be a tuple"),
        ((3.0, 4.0), r"x of `data` must be arrays.*float64 of shape \(\)"),
        ((X, 1), r"y of `data` must be arrays"),
        ((X, Y, 2.0), r"sample weights of `data` must be arrays"),
        ((SPARSE, Y), r"x of `data` must be .* sparse .*from SparseTensor"),
        ((tf.ragged.constant(RAGGED), [0, 1]), r"x of `data` must be .*RaggedTensor"),
        ((RAGGED, [0, 1]), r"x of `data` cannot be made an array"),
        (
            (NoArray(), Y),
            r"x of `data` cannot be made an array.*requires grad.*NoArray",
        ),
        ((np.array([object()] * 40), Y), r"x of `data` must be arrays.*object"),
        ((Y.astype("datetime64[s]"), Y), r"x of `data` must be arrays.*datetime64"),
        ((iter(X), Y), r"x of `data` must be arrays"),
        (([*X], Y), r"x of `data` holds 40 arrays.* takes 1.*np\.stack"),
        ((X, Y[:-1]), "same number of examples"),
        ((X[:0], Y[:0]), "same number of examples"),
        ((X * np.inf, Y), "not finite"),
    ],
)
def test_what_is_no_array_of_examples(data, message):
    with pytest.raises(ValueError, match=message):
        read_data("data", data, net())


# Batches.


@pytest.mark.parametrize("parts", [(X, Y), (X, Y, np.ones(40)), (X,)], ids=len)
@pytest.mark.parametrize("make", [batched, Numbered, generated])
def test_batches_of_every_kind(make, parts):
    data = read_data("data", make(*parts), net(), len(parts) > 1, once=True)
    batches = list(training_batches(data, FEW)("coding", 0).take(7))
    assert {len(batch) for batch in batches} == {len(parts)}
    for i, batch in enumerate(batches):
        for seen, part in zip(batch, parts, strict=True):
            start = 8 * (i % 5)
            np.testing.assert_array_equal(seen, part[start : start + 8])


def test_inputs_alone_in_a_dataset():
    alone = tf.data.Dataset.from_tensor_slices(X).batch(8)
    named = tf.data.Dataset.from_tensor_slices({"x": X}).batch(8)
    for data in (alone, named):
        (x,) = next(iter(read_data("data", data, net(), labelled=False)))
        np.testing.assert_array_equal(tf.nest.flatten(x)[0], X[:8])
        with pytest.raises(ValueError, match=r"`data` holds inputs alone.*`distill"):
            read_data("data", data, net())


def test_a_numbered_dataset_goes_on_from_any_step():
    batches = training_batches(read_data("data", Numbered(X, Y), net()), FEW)
    x, _ = next(iter(batches("coding", 7)))
    np.testing.assert_array_equal(x, X[16:24])


def test_batches_of_different_shapes():
    class Growing(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return np.ones((2 + i, 3 + i, 2)), np.ones(2 + i)

    model = keras.Sequential([layers.Input((None, 2)), layers.LSTM(1)])
    data = read_data("data", Growing(), model)
    assert [x.shape for x, _ in data] == [(2, 3, 2), (3, 4, 2), (4, 5, 2)]


def test_a_generator_that_goes_on_where_it_was():
    data = read_data("data", generated(X, Y), net(), once=True)
    batches = training_batches(data, FEW)
    seen = [batches(phase, 0).take(2) for phase in PHASES]
    seen = np.concatenate([x for phase in seen for x, _ in phase])
    np.testing.assert_array_equal(seen, np.concatenate([X, X])[:48])


@pytest.mark.parametrize("dataset", [batched(X, Y).unbatch(), batched(X).unbatch()])
def test_a_dataset_that_is_not_batched(dataset):
    labelled = len(dataset.element_spec) == 2
    with pytest.raises(ValueError, match=r"`data` .*single examples.*Batch it"):
        read_data("data", dataset, net(), labelled)


def test_a_dataset_of_rows_to_which_keras_adds_an_axis():
    model = keras.Sequential([layers.Input((1,)), layers.Dense(1)])
    for drop in (False, True):
        rows = tf.data.Dataset.from_tensor_slices((X[:, 0], Y)).batch(8, drop)
        assert read_data("data", rows, model) is rows
    with pytest.raises(ValueError, match="Batch it"):
        read_data("data", rows.unbatch().map(lambda x, y: ([x], y)), model)


@pytest.mark.parametrize(
    "data, message",
    [
        (batched(X, Y).take(0), "`data` is an empty"),
        ((batch for batch in ()), "`data` is a generator that gives nothing"),
    ],
)
def test_nothing(data, message):
    with pytest.raises(ValueError, match=message):
        read_data("data", data, net(), once=True)


def test_batches_that_come_only_once_or_never_end():
    with pytest.raises(ValueError, match=r"`data` is a generator.*`workdir`.*PyDat"):
        read_data("data", generated(X, Y), net())
    endless = batched(X, Y).repeat()
    with pytest.raises(ValueError, match="`data` never ends"):
        read_data("data", endless, net(), ends=True)
    assert read_data("data", endless, net()) is endless


@pytest.mark.parametrize("make", [Numbered, generated])
def test_runs_with_batches_of_every_kind(tmp_path, few_steps, make):
    options = {} if make is generated else {"validation_data": make(X, Y)}
    result = compressed(tmp_path, net(), make(X, Y), **options)
    assert len(result.stages) == (0 if make is generated else 4)
    if result.stages:
        loss = LOSS(Y, result.model(X))
        assert result.stages["decoded"]["loss"] == pytest.approx(float(loss), rel=1e-5)


def test_a_generator_that_ends_too_soon(tmp_path, few_steps):
    few = (batch for batch in [(X, Y)] * 2)
    with (
        pytest.warns(UserWarning, match="ran out of data"),
        pytest.raises(ValueError, match=r"ended after 2 of 3 .*a generator that ends"),
    ):
        compressed(tmp_path, net(), few)


def test_a_generator_can_be_distilled(tmp_path, few_steps):
    compressed(tmp_path, net(), generated(X), distill=True)


@pytest.mark.parametrize("option", ["workdir", "validation_data"])
def test_a_generator_is_refused_where_it_is_needed_twice(tmp_path, option):
    value = tmp_path / "work" if option == "workdir" else generated(X, Y)
    with pytest.raises(ValueError, match="is a generator"):
        compressed(tmp_path, net(), generated(X, Y), **{option: value})
    assert not list(tmp_path.iterdir())


# Weights of examples.


@pytest.mark.parametrize("make", [lambda *data: data, Numbered])
def test_weights_of_classes(tmp_path, few_steps, make):
    """As those of the examples do, in training only."""

    def losses(name, data, **options):
        (tmp_path / name).mkdir()
        recipe = dataclasses.replace(FEW, batch_size=40, train_steps=1)
        result = compressed(
            tmp_path / name, net(), data, recipe, validation_data=(X, Y), **options
        )
        return result.curve[0]["loss"], result.stages["original"]["loss"]

    weights = {0: 0.5, 1: 2.0, 2: 7.0}
    by_example = np.array([weights[y] for y in Y], np.float32)
    of_classes = losses("classes", make(X, Y), class_weight=weights)
    of_examples = losses("examples", make(X, Y, by_example))
    plain = losses("plain", make(X, Y))
    assert of_classes == pytest.approx(of_examples, rel=1e-5)
    assert of_classes[0] > 1.2 * plain[0] and of_classes[1] == plain[1]


def test_weights_of_classes_need_classes(tmp_path):
    model = keras.Sequential([layers.Input((4,)), Penalized(3)])
    model.compile("adam")
    with pytest.raises(ValueError, match="`class_weight` needs labels"):
        compressed(tmp_path, model, X, class_weight={0: 1.0})
    with pytest.raises(ValueError, match=r"`class_weight` .* weights of examples"):
        compressed(tmp_path, net(), (X, Y, np.ones(40)), class_weight={0: 1.0})


# Losses of the network alone.


@keras.saving.register_keras_serializable("tests_of_tfmiracle")
class Penalized(layers.Dense):
    def call(self, x):
        y = super().call(x)
        self.add_loss(keras.ops.mean(keras.ops.square(y - 1)))
        return y


@keras.saving.register_keras_serializable("tests_of_tfmiracle")
class Autoencoder(keras.Model):
    """Draws its code at random; losses of two kinds."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.encode, self.decode = layers.Dense(4), layers.Dense(4)
        self.seed = keras.random.SeedGenerator(1)

    def build(self, shape):
        self.encode.build(shape)
        self.decode.build((None, 2))
        self.built = True

    def call(self, x, training=None):
        mean, log_std = keras.ops.split(self.encode(x), 2, axis=-1)
        noise = keras.random.normal(keras.ops.shape(mean), seed=self.seed)
        y = self.decode(mean + keras.ops.exp(log_std) * noise if training else mean)
        self.add_loss(keras.ops.mean(keras.ops.square(mean) - log_std))
        self.add_loss(keras.ops.mean(keras.ops.square(x - y)))
        return y


def penalized():
    return keras.Sequential([layers.Input((4,)), Penalized(3)])


def autoencoder():
    model = Autoencoder()
    model.build((None, 4))
    return model


@pytest.mark.parametrize("make", [penalized, autoencoder])
@pytest.mark.parametrize(
    "data",
    [(X, None), (X,), X.tolist(), "dataset of x"],
    ids=lambda data: type(data).__name__,
)
def test_losses_of_the_network_alone(tmp_path, few_steps, make, data):
    keras.utils.set_random_seed(1)
    model = make()
    model.compile("adam")
    if isinstance(data, str):
        data = tf.data.Dataset.from_tensor_slices(X).batch(8)
    result = compressed(tmp_path, model, data, validation_data=data)
    expected = model.evaluate(X, batch_size=8, verbose=0)
    assert result.stages["original"]["loss"] == pytest.approx(expected, rel=1e-4)
    expected = result.model.evaluate(X, batch_size=8, verbose=0)
    assert result.stages["decoded"]["loss"] == pytest.approx(expected, rel=1e-4)


def test_looking_for_losses_changes_nothing():
    parts = [layers.BatchNormalization(), layers.Dropout(0.5), Penalized(3)]
    model = keras.Sequential([layers.Input((4,)), *parts])
    before = [v.numpy() for v in model.variables]
    assert adds_losses(model, X)
    for v, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(v, value)
    assert model.losses == []


@pytest.mark.parametrize("regularizer", [None, "l2"])
def test_no_loss_at_all(tmp_path, regularizer):
    layer = layers.Dense(3, kernel_regularizer=regularizer)
    model = keras.Sequential([layers.Input((4,)), layer])
    model.compile("adam")
    with pytest.raises(ValueError, match=r"`loss` is missing.*`add_loss`"):
        compressed(tmp_path, model, X)


# Fixed batches.


def stateful():
    inner = layers.LSTM(3, stateful=True)
    return keras.Sequential([layers.Input(batch_shape=(8, 4, 1)), inner])


def functional():
    x = layers.Input(batch_shape=(8, 4))
    outputs = {name: layers.Dense(3, name=name)(x) for name in ("p", "q")}
    return keras.Model(x, outputs)


@keras.saving.register_keras_serializable("tests_of_tfmiracle")
class Remembering(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.memory = layers.GRU(3, stateful=True)

    def build(self, shape):
        self.memory.build((8, 4, 1))
        self.built = True

    def call(self, x):
        return self.memory(x)


def subclassed():
    model = Remembering()
    model.build(None)
    return model


@pytest.mark.parametrize("make", [stateful, functional, subclassed])
def test_the_batch_that_a_network_is_fixed_to(make):
    assert fixed_batch(make()) == 8
    assert fixed_batch(tfmiracle.VariationalModel(make())) == 8
    assert fixed_batch(net()) is None


@pytest.mark.parametrize(
    "make, count, distill",
    [
        (stateful, 40, False),
        (stateful, 21, True),
        (functional, 21, False),
        (functional, 3, False),
        (functional, 21, True),
        (subclassed, 21, False),
    ],
)
def test_networks_of_a_fixed_batch(tmp_path, few_steps, make, count, distill):
    keras.utils.set_random_seed(1)
    model = make()
    x = X[:count] if make is functional else X[:count, :, np.newaxis]
    y = np.ones((count, 3), np.float32)
    y = {"p": y, "q": y} if make is functional else y
    loss = {"p": "mse", "q": "mae"} if make is functional else "mse"
    model.compile("adam", loss)
    recipe = dataclasses.replace(FEW, batch_size=64)  # the network has its own
    result = compressed(
        tmp_path, model, (x, y), recipe, validation_data=(x, y), distill=distill
    )
    assert len(result.stages) == 4
    assert result.model.count_params() == model.count_params()
    if make is functional and not distill:
        free = keras.Model(new := layers.Input((4,)), result.model(new))
        free.compile("adam", loss)
        expected = free.evaluate(x, y, verbose=0, return_dict=True)["loss"]
        assert result.stages["decoded"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_part_of_a_batch_has_its_own_outputs():
    keras.utils.set_random_seed(1)
    model = functional()
    expected = model(X[:8])
    for count in (8, 5, 1):
        outputs = WholeBatches(model)(X[:count])
        for name, y in outputs.items():
            np.testing.assert_allclose(y, expected[name][:count], rtol=1e-6)


def test_an_ensemble_of_a_network_of_a_fixed_batch(eager):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([layers.Input(batch_shape=(8, 4)), layers.Dense(3)])
    model = tfmiracle.VariationalModel(model, block_size=5, block_bits=6)
    outputs = tfmiracle.predict_ensemble(model, X[:21].tolist(), 2)
    assert outputs.shape == (21, 3)
