"""`smallvit serve`."""

from math import isfinite

from smallvit.common.arguments import Device, Float, Folder, Run, Text
from smallvit.common.env import prepare
from smallvit.common.extras import EXTRAS, need


def serve(
    run: Run,
    /,
    host: str = "127.0.0.1",
    port: int = 8000,
    threshold: Float = None,
    precision: Float = None,
    examples: Folder = None,
    upload_mb: float = 32,
    images: int = 64,
    queue: int = 512,
    seconds: float = 30,
    decoders: int = 2,
    token: Text = None,
    allow_host: tuple[str, ...] = (),
    device: Device = None,
) -> None:
    """Serve a trained model: a page for the browser, and a JSON API.

    Args:
        run: A run folder or its model/; or the folder of a cross-validation, for the ensemble of its models.
        host: Address to listen on; 0.0.0.0 accepts connections from other machines.
        port: Port to listen on; 0 takes any free port.
        threshold: Answer "unsure" if the highest probability is below this.
        precision: Choose the threshold that gives this precision on the run's validation images.
        examples: Folder of images that the page offers as examples.
        upload_mb: Maximum upload size per request, in MB.
        images: Maximum number of images per request.
        queue: Maximum number of images waiting for an answer.
        seconds: Timeout of an upload, and of an answer, in seconds.
        decoders: Number of processes that decode images; one more decodes large images.
        token: Token that requests must send; generated and printed if other machines can connect.
        allow_host: Other host names accepted in requests, such as that of a reverse proxy.
        device: Kind of device to compute on.
    """
    for package in EXTRAS["serve"]:
        need(package, "serving a model")
    from smallvit.serving import Limits
    from smallvit.serving import serve as serve_model

    prepare(device)
    upload = int(upload_mb * 2**20) if isfinite(upload_mb) else 0
    limits = Limits(
        upload=upload,
        memory=max(8 * upload, 1),
        images=images,
        queue=queue,
        seconds=seconds,
        decoders=decoders,
    )
    serve_model(
        run,
        host=host,
        port=port,
        threshold=threshold,
        precision=precision,
        examples=examples,
        limits=limits,
        token=token,
        hosts=allow_host,
    )
