"""The posterior beside a file."""

import zipfile

import numpy as np
import pytest
from support import fix_all

import tfmiracle
from tfmiracle import CodedPosterior
from tfmiracle.hosts.network import coded_posterior, to_file


def model(seed=0, block_size=7):
    import keras

    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.layers.Input((4,)),
            tfmiracle.MeanKLDense(5, block_size=block_size, seed=seed),
            tfmiracle.MeanKLDense(3, block_size=block_size, seed=seed + 1),
        ]
    )


@pytest.fixture
def posterior():
    return coded_posterior(fix_all(model()))


def test_it_is_q(posterior):
    made = model()
    for g, layer in enumerate(made.layers):
        np.testing.assert_allclose(posterior.loc[g], layer.posterior.mean(), rtol=1e-6)
        stddev = layer.posterior.stddev()
        np.testing.assert_allclose(posterior.scale[g], stddev, rtol=1e-6)


def test_what_is_printed_holds_no_arrays(posterior):
    count = sum(map(len, posterior.loc))
    assert repr(posterior) == f"CodedPosterior({count} weights of 2 groups)"


def test_round_trip(posterior, tmp_path):
    path = tmp_path / "net.posterior.npz"
    posterior.write(path)
    again = CodedPosterior.read(path)
    np.testing.assert_equal(again.loc, posterior.loc)
    np.testing.assert_equal(again.scale, posterior.scale)
    assert again.codes_crc32 == posterior.codes_crc32 is not None
    with pytest.raises(FileExistsError):
        posterior.write(path)
    posterior.write(path, overwrite=True)


def test_it_must_fit_the_file(posterior):
    posterior.check_fits(to_file(fix_all(model())))
    other = CodedPosterior(posterior.loc[:1], posterior.scale[:1])
    with pytest.raises(ValueError, match=r"`loc` has .*25.* the file .*25, 18"):
        other.check_fits(to_file(fix_all(model())))
    longer = CodedPosterior(posterior.loc, [*posterior.scale[:1], np.ones(9)])
    with pytest.raises(ValueError, match="`scale` has"):
        longer.check_fits(to_file(fix_all(model())))
    of_another = to_file(fix_all(model()))
    of_another.groups[1].codes[0] ^= 1
    with pytest.raises(ValueError, match="of one with other codes"):
        posterior.check_fits(of_another)
    unknown = CodedPosterior(posterior.loc, posterior.scale)
    unknown.check_fits(of_another)


def test_what_is_no_posterior_is_refused(posterior, tmp_path):
    path = tmp_path / "it.npz"
    posterior.write(path)
    data = path.read_bytes()
    one = np.ones(3, np.float32)
    for bad in (
        b"",
        data[:100],
        b"junk" * 50,
        {"loc_0": one},
        {"loc_0": one, "scale_1": one},
        {"loc_0": one, "scale_0": one, "loc_1": one},
        {"loc_0": one, "scale_0": one[:2]},
        {"loc_0": one.astype(float), "scale_0": one},
        {"loc_0": one * np.nan, "scale_0": one},
        {"loc_0": one, "scale_0": 0 * one},
        {"loc_0": one, "scale_0": np.array([None])},
        {},
    ):
        if isinstance(bad, bytes):
            path.write_bytes(bad)
        else:
            np.savez(path, **bad)
        with pytest.raises(ValueError, match=r"it\.npz is no posterior"):
            CodedPosterior.read(path)
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("loc_0", "scale_0"):
            archive.writestr(name, b"no array")
    with pytest.raises(ValueError, match=r"it\.npz is no posterior"):
        CodedPosterior.read(path)
    np.save(tmp_path / "array.npy", one)
    with pytest.raises(ValueError, match="is no posterior"):
        CodedPosterior.read(tmp_path / "array.npy")
    with pytest.raises(FileNotFoundError):
        CodedPosterior.read(tmp_path / "missing.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damage_is_refused_or_harmless(posterior, tmp_path, save):
    path = tmp_path / "it.npz"
    save(path, loc_0=posterior.loc[0], scale_0=posterior.scale[0])
    data = path.read_bytes()
    refused = 0
    for position in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            again = CodedPosterior.read(path)
        except ValueError as error:
            assert "it.npz is no posterior" in str(error)
            refused += 1
        else:  # a date, say
            np.testing.assert_equal(again.loc, posterior.loc[:1])
            np.testing.assert_equal(again.scale, posterior.scale[:1])
    assert refused > 50
