"""What the command line and `CompressionResult` say about a file. Needs NumPy only."""

from tfmiracle.miracle_file import MiracleFile


def sizes(file: MiracleFile, file_bytes: int) -> dict:
    """The numbers that describe a file, as JSON can say them.

    What differs between the groups of the file is a list.
    """
    groups = file.groups

    def common(values):
        values = list(values)
        return (
            values[0] if values and values.count(values[0]) == len(values) else values
        )

    return {
        "file_bytes": file_bytes,
        "payload_bytes": file.payload_bytes,
        "float32_bytes": file.float32_bytes,
        "ratio": round(file.float32_bytes / file_bytes, 1),
        "payload_ratio": round(file.float32_bytes / max(file.payload_bytes, 1), 1),
        "weights": file.num_weights,
        "effective_weights": sum(g.layout.num_effective for g in groups),
        "blocks": sum(g.layout.num_blocks for g in groups),
        "block_size": common(g.layout.block_size for g in groups),
        "block_bits": common(
            round(g.code.bits(g.layout.block_size), 2) for g in groups
        ),
        "code": common(g.code.identifier for g in groups),
        "codebook": common(getattr(g.code, "codebook", None) for g in groups),
    }


def show_sizes(r: dict) -> str:
    """Two lines of what `sizes` found."""
    return (
        f"{r['file_bytes']:,} bytes, of which {r['payload_bytes']:,} are indices: "
        f"{r['ratio']:g}x smaller than {r['weights']:,} float32 weights "
        f"({r['payload_ratio']:g}x counting indices only)\n"
        f"{r['blocks']:,} blocks of {r['block_size']} weights, "
        f"{r['block_bits']} bits each"
    )


def compression(
    stages: dict[str, dict[str, float]],
    file: MiracleFile,
    file_bytes: int,
    path: str,
    seconds: float,
    evaluated_on: str,
    before: str | None = None,
) -> dict:
    """The numbers that describe a compression, as JSON can say them.

    Args:
      stages, file, file_bytes, path, seconds: see `CompressionResult`.
      evaluated_on: what the stages were evaluated on.
      before: the stage that the decoded network is compared with; by default "warmup"
        if there is one, else "original".

    Returns:
      A dict; "error" and "error_before" and those of the stages in "errors" are None
      where there is no accuracy, as for values.
    """
    errors = {stage: _error(metrics) for stage, metrics in stages.items()}
    before = before or ("warmup" if "warmup" in stages else "original")
    return {
        "error": errors.get("decoded"),
        "error_before": errors.get(before),
        "errors": errors,
        "losses": {stage: metrics.get("loss") for stage, metrics in stages.items()},
        "evaluated_on": evaluated_on,
        **sizes(file, file_bytes),
        "seconds": round(seconds, 1),
        "output": path,
    }


def _error(metrics):
    accuracy = metrics.get("accuracy")
    return None if accuracy is None else round(1 - float(accuracy), 6)


def show_compression(r: dict) -> str:
    """Four lines of what `compression` found."""
    losses = r["losses"]
    if not losses:
        change = "not evaluated"
    elif r["error"] is not None:
        change = f"error before {r['error_before']:.2%}, after {r['error']:.2%}"
    else:
        before = losses.get("warmup", losses["original"])
        change = f"loss before {before:.4g}, after {losses['decoded']:.4g}"
    return (
        f"{change} ({r['evaluated_on']})\n{r['output']}: {show_sizes(r)}\n"
        f"{r['seconds']:.0f} seconds"
    )
