"""Networks that the command line knows by name."""

import math

import keras
from keras import layers


def lenet5(input_shape=(28, 28, 1), num_classes: int = 10) -> keras.Model:
    """LeNet-5 as in Lin et al. (2023), appendix C; 431,080 weights for MNIST.

    Two 5x5 convolutions (20 and 50 filters), each with ReLU and 2x2 max pooling, then
    dense layers of 500 and `num_classes`. Returns logits. Kernels and biases start
    uniform within 1 / sqrt(fan in), which is PyTorch's default and the paper's.
    """
    model = keras.Sequential([layers.Input(input_shape)], name="lenet5")
    for i, filters in enumerate((20, 50), start=1):
        fan_in = 25 * model.output_shape[-1]
        model.add(
            layers.Conv2D(
                filters, 5, activation="relu", name=f"conv{i}", **_uniform(fan_in)
            )
        )
        model.add(layers.MaxPooling2D(name=f"pool{i}"))
    model.add(layers.Flatten(name="flatten"))
    for i, units, activation in ((1, 500, "relu"), (2, num_classes, None)):
        fan_in = model.output_shape[-1]
        model.add(
            layers.Dense(
                units, activation=activation, name=f"dense{i}", **_uniform(fan_in)
            )
        )
    return model


def digits_cnn(input_shape=(8, 8, 1), num_classes: int = 10) -> keras.Model:
    """A small convolutional network for 8x8 digits; 37,610 weights. Returns logits."""
    return keras.Sequential(
        [
            layers.Input(input_shape),
            layers.Conv2D(32, 3, padding="same", activation="relu", name="conv1"),
            layers.Conv2D(32, 3, padding="same", activation="relu", name="conv2"),
            layers.MaxPooling2D(name="pool"),
            layers.Flatten(name="flatten"),
            layers.Dense(52, activation="relu", name="dense1"),
            layers.Dense(num_classes, name="dense2"),
        ],
        name="digits_cnn",
    )


ARCHITECTURES = {"lenet5": lenet5, "digits_cnn": digits_cnn}


def _uniform(fan_in):
    limit = 1 / math.sqrt(fan_in)
    return {
        "kernel_initializer": keras.initializers.VarianceScaling(
            1 / 3, "fan_in", "uniform"
        ),
        "bias_initializer": keras.initializers.RandomUniform(-limit, limit),
    }
