"""Networks for small images as in CIFAR-10: ResNets, a MobileNet, a transformer."""

import keras
from keras import layers


def resnet8(input_shape=(32, 32, 3), num_classes: int = 10) -> keras.Model:
    """ResNet-8 of MLPerf Tiny (Banbury et al., 2021). Returns logits.

    78,666 weights for CIFAR-10, 480 of them statistics of normalizations. Convolutions
    have biases, and shortcuts no normalization.
    """
    return _resnet(input_shape, num_classes, 1, biases=True, name="resnet8")


def resnet20(
    input_shape=(32, 32, 3), num_classes: int = 10, strides: int = 1
) -> keras.Model:
    """ResNet-20 of He et al. (2016) for CIFAR. Returns logits.

    274,042 weights for CIFAR-10, 1,568 of them statistics of normalizations. Shortcuts
    between stages are 1x1 convolutions, their option B. `strides` are those of the
    first convolution.
    """
    return _resnet(
        input_shape, num_classes, 3, biases=False, strides=strides, name="resnet20"
    )


def mobilenet_v2(input_shape=(32, 32, 3), num_classes: int = 10) -> keras.Model:
    """MobileNetV2 of width 0.35 (Sandler et al., 2018). Returns logits.

    423,018 weights for 10 classes, 14,112 of them statistics of normalizations, as
    `keras.applications.MobileNetV2` has. The first two of the five strides of 2 are 1,
    so that images of 32x32 become 4x4.
    """
    stages = (  # times as many channels within a block, channels, blocks, strides
        *((1, 8, 1, 1), (6, 8, 2, 1), (6, 16, 3, 2), (6, 24, 4, 2)),
        *((6, 32, 3, 1), (6, 56, 3, 2), (6, 112, 1, 1)),
    )
    check_images(input_shape)
    inputs = layers.Input(input_shape)
    x = layers.ReLU(6)(_convolution(inputs, 16, 3, name="stem"))
    for stage, (times, channels, blocks, strides) in enumerate(stages, 1):
        for block in range(1, blocks + 1):
            name, y = f"stage{stage}_block{block}", x
            if times > 1:
                y = _convolution(y, times * y.shape[-1], 1, name=f"{name}_expand")
                y = layers.ReLU(6)(y)
            y = layers.DepthwiseConv2D(
                3,
                strides if block == 1 else 1,
                padding="same",
                use_bias=False,
                name=f"{name}_depthwise",
            )(y)
            y = layers.BatchNormalization(name=f"{name}_depthwise_norm")(y)
            y = _convolution(layers.ReLU(6)(y), channels, 1, name=f"{name}_project")
            x = layers.Add()([x, y]) if block > 1 else y
    x = layers.ReLU(6)(_convolution(x, 1280, 1, name="head"))
    x = layers.GlobalAveragePooling2D()(x)
    return _classifier(inputs, x, num_classes, "mobilenet_v2")


def vision_transformer(
    input_shape=(32, 32, 3),
    num_classes: int = 10,
    patch: int = 4,
    width: int = 96,
    depth: int = 4,
) -> keras.Model:
    """A small vision transformer (Dosovitskiy et al., 2021). Returns logits.

    311,050 weights for CIFAR-10: `depth` blocks of attention with four heads and of a
    perceptron, over patches of `patch` pixels either way. What is classified is the
    mean over the patches.
    """
    check_images(input_shape)
    height, length, channels = input_shape
    rows, columns = height // patch, length // patch
    if (rows * patch, columns * patch) != (height, length):
        raise ValueError(
            "vision_transformer needs images whose height and width are multiples of "
            f"{patch}, not {tuple(input_shape)}. Pad or crop them."
        )
    inputs = layers.Input(input_shape)
    x = layers.Reshape((rows, patch, columns, patch * channels))(inputs)
    x = layers.Permute((1, 3, 2, 4))(x)
    x = layers.Reshape((rows * columns, patch * patch * channels))(x)
    # The bias has an entry for each patch: it is the embedding of the positions.
    x = layers.EinsumDense(
        "bpi,io->bpo", (rows * columns, width), bias_axes="po", name="patches"
    )(x)
    for block in range(1, depth + 1):
        name = f"block{block}"
        y = layers.LayerNormalization(name=f"{name}_norm1")(x)
        attention = layers.MultiHeadAttention(4, width // 4, name=f"{name}_attention")
        x = layers.Add()([x, attention(y, y)])
        y = layers.LayerNormalization(name=f"{name}_norm2")(x)
        y = layers.Dense(2 * width, activation="gelu", name=f"{name}_dense1")(y)
        x = layers.Add()([x, layers.Dense(width, name=f"{name}_dense2")(y)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization(name="norm")(x))
    return _classifier(inputs, x, num_classes, "vision_transformer")


def check_images(shape):
    """Raises a ValueError unless it is a shape of images."""
    if len(shape) != 3:
        raise ValueError(
            "Built-in networks take images, [height, width, channels]; examples have "
            f"shape {tuple(shape)}. Pass a network of your own."
        )


def _resnet(input_shape, num_classes, blocks, *, biases, strides=1, name):
    """Three stages of 16, 32 and 64 channels; `blocks` in each."""
    check_images(input_shape)
    he = {"kernel_initializer": "he_normal", "use_bias": biases}
    inputs = layers.Input(input_shape)
    x = layers.ReLU()(_convolution(inputs, 16, 3, strides, name="stem", **he))
    for stage, channels in enumerate((16, 32, 64), 1):
        for block in range(1, blocks + 1):
            prefix = f"stage{stage}_block{block}"
            strides = 2 if stage > 1 and block == 1 else 1
            y = _convolution(x, channels, 3, strides, name=f"{prefix}_conv1", **he)
            y = layers.ReLU()(y)
            y = _convolution(y, channels, 3, name=f"{prefix}_conv2", **he)
            if strides > 1:
                shortcut = {"name": f"{prefix}_shortcut", "norm": not biases, **he}
                x = _convolution(x, channels, 1, strides, **shortcut)
            x = layers.ReLU()(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling2D()(x)
    return _classifier(inputs, x, num_classes, name)


def _convolution(x, channels, size, strides=1, *, name, norm=True, **options):
    options = {"padding": "same", "use_bias": False, **options}
    x = layers.Conv2D(channels, size, strides, name=name, **options)(x)
    return layers.BatchNormalization(name=f"{name}_norm")(x) if norm else x


def _classifier(inputs, features, num_classes, name):
    logits = layers.Dense(num_classes, name="classifier")(features)
    return keras.Model(inputs, logits, name=name)
