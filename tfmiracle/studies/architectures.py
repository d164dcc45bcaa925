"""Networks that the command line knows by name."""

import math

import keras
from keras import layers

from tfmiracle.studies.deep_networks import (
    check_images,
    mobilenet_v2,
    resnet8,
    resnet20,
    vision_transformer,
)


def lenet5(input_shape=(28, 28, 1), num_classes: int = 10) -> keras.Model:
    """LeNet-5 as in Lin et al. (2023), appendix C; 431,080 weights for MNIST.

    Two 5x5 convolutions (20 and 50 filters), each with ReLU and 2x2 max pooling, then
    dense layers of 500 and `num_classes`. Returns logits. Kernels and biases start
    uniform within 1 / sqrt(fan in), which is PyTorch's default and the paper's.
    """
    check_images(input_shape)
    height, width, channels = input_shape
    for _ in range(2):
        height, width = (height - 4) // 2, (width - 4) // 2
    if min(height, width) < 1:
        raise ValueError(f"LeNet-5 needs images of 16x16 or more, not {input_shape}.")
    return keras.Sequential(
        [
            layers.Input(input_shape),
            layers.Conv2D(
                20, 5, activation="relu", name="conv1", **_uniform(25 * channels)
            ),
            layers.MaxPooling2D(name="pool1"),
            layers.Conv2D(50, 5, activation="relu", name="conv2", **_uniform(25 * 20)),
            layers.MaxPooling2D(name="pool2"),
            layers.Flatten(name="flatten"),
            layers.Dense(
                500,
                activation="relu",
                name="dense1",
                **_uniform(height * width * 50),
            ),
            layers.Dense(num_classes, name="dense2", **_uniform(500)),
        ],
        name="lenet5",
    )


def digits_cnn(input_shape=(8, 8, 1), num_classes: int = 10) -> keras.Model:
    """A convolutional network for 8x8 digits; 151,306 weights. Returns logits."""
    check_images(input_shape)
    return keras.Sequential(
        [
            layers.Input(input_shape),
            layers.Conv2D(32, 3, padding="same", activation="relu", name="conv1"),
            layers.MaxPooling2D(name="pool1"),
            layers.Conv2D(64, 3, padding="same", activation="relu", name="conv2"),
            layers.Flatten(name="flatten"),
            layers.Dense(128, activation="relu", name="dense1"),
            layers.Dense(num_classes, name="dense2"),
        ],
        name="digits_cnn",
    )


ARCHITECTURES = {
    "lenet5": lenet5,
    "digits_cnn": digits_cnn,
    "resnet8": resnet8,
    "resnet20": resnet20,
    "mobilenet_v2": mobilenet_v2,
    "vision_transformer": vision_transformer,
}


def new_network(
    name: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    dtype_policy: str,
    seed: int,
) -> keras.Model:
    """A network of `ARCHITECTURES` that computes as the Keras dtype policy says.

    Sets all random seeds, on which its weights depend. Raises ValueError if the policy
    is none that trains.
    """
    policy = keras.dtype_policies.get(dtype_policy)
    dtypes = policy.variable_dtype, policy.compute_dtype
    quantized = isinstance(policy, keras.dtype_policies.QuantizedDTypePolicy)
    if quantized or not all("float" in (dtype or "") for dtype in dtypes):
        raise ValueError(
            "`dtype_policy` must be a Keras dtype policy of floating-point numbers. "
            f"Received: dtype_policy={dtype_policy!r}"
        )
    keras.utils.set_random_seed(seed % 2**32)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        return ARCHITECTURES[name](input_shape, num_classes)
    finally:
        keras.config.set_dtype_policy(before)


def _uniform(fan_in):
    limit = 1 / math.sqrt(fan_in)
    return {
        "kernel_initializer": keras.initializers.VarianceScaling(
            1 / 3, "fan_in", "uniform"
        ),
        "bias_initializer": keras.initializers.RandomUniform(-limit, limit),
    }
