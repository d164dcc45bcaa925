"""Training and coding under a `tf.distribute.Strategy`, in processes of their own."""

import json

import numpy as np
import pytest
from support import run_python

START = """
import json, sys
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


def show(**found):
    print(json.dumps(found))
"""


def found(code, *arguments):
    process = run_python(START + code, *arguments)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


CODE = """
make, parameterization, path = sys.argv[1:]
options = {
    "mean_kl": tfmiracle.MeanKL(initial_budget=4.0, annealing_steps=10),
    "mean_var": tfmiracle.MeanVar(beta=1e-2, beta_rate=0.1),
}
with mirrored.scope():
    model = globals()[make](options[parameterization])
    model.compile(keras.optimizers.Adam(0.01), "mse")
coding = tfmiracle.CompressionCallback(
    path, 2, 2, train_steps=3, verbose=0, recalibration_data=[normal(16, 6)]
)
model.fit(
    normal(32, 6), normal(32, 2), batch_size=8, epochs=9, verbose=0, callbacks=[coding]
)
x = normal(9, 6)
copies = [of_replicas(v.value) for v in model.variables]
show(
    same_copies=all(np.array_equal(*pair) for pair in copies),
    coded=all(p.fixed.all() for p, _ in posteriors(model)),
    error=float(np.abs(tfmiracle.load(path)(x) - model.predict(x, verbose=0)).max()),
)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, parameterization", [("whole", "mean_kl"), ("of_layers", "mean_var")]
)
def test_two_replicas_are_trained_and_coded(tmp_path, make, parameterization):
    result = found(CODE, make, parameterization, tmp_path / "net.miracle")
    assert result["same_copies"] and result["coded"]
    assert result["error"] < 1e-5


NOISE = """
with mirrored.scope():
    posterior = whole("mean_kl").block_posterior
draw = tf.function(lambda: posterior.values(sample=True)[0])
twice = [v for _ in range(2) for v in of_replicas(mirrored.run(draw))]
show(
    drawn=[np.ravel(v).tolist() for v in twice],
    states=[s.tolist() for s in of_replicas(posterior.noise_seed.state.value)],
)
"""


def test_replicas_have_noise_of_their_own():
    result = found(NOISE)
    drawn = np.array(result["drawn"])
    assert len({tuple(row) for row in drawn}) == 4
    assert result["states"] == [[0, 2], [0, 2]]  # as those of one replica


PENALTY = """
results = []
for strategy in (mirrored, tf.distribute.OneDeviceStrategy("CPU:1")):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        # Hardly any noise: the data of both halves and the penalty make the gradient.
        mean_var = tfmiracle.MeanVar(beta=3.0, beta_rate=0.1, log_stddev=-30.0)
        model = whole(mean_var, l2=0.7)
        model.compile(keras.optimizers.SGD(1e-3), "mse")
    x, y = (np.concatenate([normal(4, n)] * 2) for n in (6, 2))
    history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False)
    posterior = model.block_posterior
    values = [posterior.loc, posterior._log_stddev, posterior.beta]
    results.append(
        [history.history["loss"], *(np.ravel(v.numpy()).tolist() for v in values)]
    )
show(results=results)
"""


@pytest.mark.slow
def test_penalties_of_two_replicas_count_once():
    two, one = found(PENALTY)["results"]
    for a, b in zip(two, one, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert two[0][0] > 1000  # nearly all of it the penalty


COMPRESS = """
recipe = tfmiracle.Recipe(
    train_steps=10, finetune_steps=10, block_size=10, block_bits=6, blocks_per_round=3,
    batch_size=8,
)
x, y = normal(21, 6), normal(21, 2)
with mirrored.scope():
    net = keras.Sequential([layers.Input((6,)), layers.Dense(4), layers.Dense(2)])
    net.compile("adam", "mse")
    result = tfmiracle.compress(
        net, (x, y), None, sys.argv[1], recipe, validation_data=(x, y), verbose=0
    )
net = tfmiracle.load(sys.argv[1])
net.compile("adam", "mse")
show(decoded=result.stages["decoded"]["loss"], loaded=net.evaluate(x, y, verbose=0))
"""


@pytest.mark.slow
def test_compress_in_the_scope_of_a_strategy(tmp_path):
    result = found(COMPRESS, tmp_path / "net.miracle")
    assert result["decoded"] == pytest.approx(result["loaded"], rel=1e-4)
