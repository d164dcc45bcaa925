"""Training and coding under a `tf.distribute.Strategy`, in a process of its own."""

import json

import numpy as np
import pytest
from support import run_python

CODE = """
import json, sys, traceback
import keras
import numpy as np
import tensorflow as tf
from keras import layers
import tfmiracle
from tfmiracle.hosts.models import posteriors

(cpu,) = tf.config.list_physical_devices("CPU")
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)
mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def of_replicas(value):
    return [v.numpy() for v in mirrored.experimental_local_results(value)]


def whole(parameterization, **options):
    parts = layers.Dense(4), layers.BatchNormalization(), layers.Dense(2)
    net = keras.Sequential([layers.Input((6,)), *parts])
    return tfmiracle.VariationalModel(
        net, parameterization, block_size=10, block_bits=6, **options
    )


def of_layers(parameterization, **options):
    options = {"block_size": 10, "block_bits": 6, **options}
    one, two = (
        tfmiracle.MeanKLDense(n, parameterization=parameterization, seed=n, **options)
        for n in (4, 2)
    )
    return keras.Sequential([layers.Input((6,)), one, layers.BatchNormalization(), two])


def batches(*arrays):
    options = tf.data.Options()
    options.autotune.enabled = False  # see conftest.py
    return tf.data.Dataset.from_tensor_slices(arrays).batch(8).with_options(options)


def say(name, part):
    try:
        print(json.dumps([name, part()]), flush=True)
    except Exception:
        traceback.print_exc()


def coded(make, parameterization):
    path = f"{sys.argv[1]}/{make.__name__}.miracle"
    with mirrored.scope():
        model = make(parameterization)
        model.compile(keras.optimizers.Adam(0.01), "mse")
    coding = tfmiracle.CompressionCallback(
        path, 4, 2, train_steps=3, verbose=0, recalibration_data=[normal(16, 6)]
    )
    model.fit(batches(normal(32, 6), normal(32, 2)), epochs=9, verbose=0,
              callbacks=[coding])
    x = normal(9, 6)
    copies = [of_replicas(v.value) for v in model.variables]
    return {
        "same_copies": all(np.array_equal(*pair) for pair in copies),
        "coded": all(p.fixed.all() for p, _ in posteriors(model)),
        "error": float(np.abs(tfmiracle.load(path)(x) - model(x)).max()),
    }


say("whole", lambda: coded(whole, tfmiracle.MeanKL(4.0, annealing_steps=10)))
say("layers", lambda: coded(of_layers, tfmiracle.MeanVar(beta=1e-2, beta_rate=0.1)))




def noise():
    with mirrored.scope():
        posterior = whole("mean_kl").block_posterior
    draw = tf.function(lambda: posterior.values(sample=True)[0])
    twice = [v for _ in range(2) for v in of_replicas(mirrored.run(draw))]
    states = of_replicas(posterior.noise_seed.state.value)
    return {
        "drawn": [np.ravel(v).tolist() for v in twice],
        "states": [state.tolist() for state in states],
    }


say("noise", noise)


def penalized(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        # Hardly any noise: the data of both halves and the penalty make the gradient.
        mean_var = tfmiracle.MeanVar(beta=3.0, beta_rate=0.1, log_stddev=-30.0)
        model = whole(mean_var, l2=0.7)
        model.compile(keras.optimizers.SGD(1e-3), "mse")
    x, y = (np.concatenate([normal(4, n)] * 2) for n in (6, 2))
    history = model.fit(batches(x, y), epochs=3, verbose=0)
    posterior = model.block_posterior
    values = [posterior.loc, posterior.log_stddev, posterior.beta]
    return [history.history["loss"], *(np.ravel(v.numpy()).tolist() for v in values)]


say("two", lambda: penalized(mirrored))
say("one", lambda: penalized(tf.distribute.OneDeviceStrategy("CPU:1")))


def compressed():
    path = f"{sys.argv[1]}/compressed.miracle"
    recipe = tfmiracle.Recipe(
        train_steps=10, finetune_steps=10, block_size=10, block_bits=6,
        blocks_per_round=3, batch_size=8,
    )
    x, y = normal(21, 6), normal(21, 2)
    with mirrored.scope():
        net = keras.Sequential([layers.Input((6,)), layers.Dense(4), layers.Dense(2)])
        net.compile("adam", "mse")
        result = tfmiracle.compress(
            net, (x, y), None, path, recipe, validation_data=(x, y), verbose=0
        )
    net = tfmiracle.load(path)
    net.compile("adam", "mse")
    return [result.stages["decoded"]["loss"], net.evaluate(x, y, verbose=0)]


say("compressed", compressed)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Name -> what `say` said of it, all in one process."""
    process = run_python(CODE, tmp_path_factory.mktemp("files"))
    lines = [line for line in process.stdout.splitlines() if line.startswith("[")]
    print(process.stderr)  # why a part is missing
    return dict(map(json.loads, lines))


@pytest.mark.slow
@pytest.mark.parametrize("host", ["whole", "layers"])
def test_two_replicas_are_trained_and_coded(found, host):
    assert found[host]["same_copies"] and found[host]["coded"]
    assert found[host]["error"] < 1e-5


@pytest.mark.slow
def test_replicas_have_noise_of_their_own(found):
    drawn = np.array(found["noise"]["drawn"])
    assert len({tuple(row) for row in drawn}) == 4
    assert found["noise"]["states"] == [[0, 2], [0, 2]]  # as those of one replica


@pytest.mark.slow
def test_penalties_of_two_replicas_count_once(found):
    two, one = found["two"], found["one"]
    for a, b in zip(two, one, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert two[0][0] > 1000  # nearly all of it the penalty


@pytest.mark.slow
def test_compress_in_the_scope_of_a_strategy(found):
    decoded, loaded = found["compressed"]
    assert decoded == pytest.approx(loaded, rel=1e-4)
