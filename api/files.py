"""``/v1/files``: what batches read and write, in OpenAI's shapes."""

import asyncio
import logging
import re
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from falcon.asgi import Request as HttpRequest
from falcon.asgi import Response
from falcon.asgi.multipart import BodyPart, MultipartForm
from falcon.asgi.reader import BufferedReader
from falcon.media import MultipartFormHandler
from msgspec import Meta

from api.errors import FileUnknown, NoStorage, TooLarge
from api.operation import Operation
from api.pages import once, page, place
from api.shapes import FileDeleted, FilePage, FileRecord, Upload
from brokers.api_keys import ApiKey
from brokers.files import BLOCK, File, Files, Growing
from pipeline.config import Config
from pipeline.errors import InvalidRequest

log = logging.getLogger(__name__)

PURPOSE = "batch"
MOST = 10_000  # files of a page
FORM_BYTES = 64 << 10  # of a form beside its file
LEAST_SECONDS, MOST_SECONDS = 3600, 2_592_000  # that a client may ask to keep one, as OpenAI has it
FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


def shown(file: File) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


async def find(files: Files, file_id: str, key: ApiKey) -> File:
    """Raises FileUnknown, also for another's."""
    file = await files.find(file_id)
    if file is None or not key.sees(file.owner):
        raise FileUnknown(f"there is no file {file_id[:100]}")
    return file


class FileList:
    def __init__(self, files: Files, config: Config) -> None:
        self._files = files
        self._limit = config.file_mib << 20
        self._seconds = config.file_seconds

    @Operation(
        body=Upload,
        media="multipart/form-data",
        example={"purpose": "batch", "file": "the bytes of lines.jsonl"},
        answers={200: FileRecord},
        errors=(507,),
    )
    async def on_post(self, req: HttpRequest, resp: Response) -> None:
        """Uploads a file. A form with `purpose` and `file`, in any order, that goes to the disk as it comes."""
        form = await self._form(req)
        try:
            async with self._files.receive() as growing:
                fields = await self._read(form, growing)
                seconds = self._lifetime(fields)
        except OSError as error:
            log.error("an upload cannot be kept: %s", error, extra={"action": "no_storage"})
            raise NoStorage(f"the file cannot be kept: {error.strerror}") from error
        await self._files.add(
            growing.id,
            owner=req.context.key.id,
            purpose=PURPOSE,
            filename=fields["file"],
            size=growing.size,
            seconds=seconds,
        )
        resp.media = shown(await find(self._files, growing.id, req.context.key))

    @Operation(
        answers={200: FilePage},
        errors=(400, 404),
        query={
            "after": str,
            "limit": Annotated[int, Meta(ge=1, le=MOST)],
            "order": Literal["asc", "desc"],
            "purpose": str,
        },
    )
    async def on_get(self, req: HttpRequest, resp: Response) -> None:
        """The files of the key that asks, in pages."""
        after, limit = place(req, most=MOST, default=MOST)
        purpose, order = once(req, "purpose", ""), once(req, "order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order", f"{order[:40]!r} is neither asc nor desc")
        if after:
            await find(self._files, after, req.context.key)

        def wanted(stored: Mapping[str, str]) -> bool:
            return req.context.key.sees(stored["owner"]) and purpose in ("", stored["purpose"])

        found, more = await self._files.catalogue.page(wanted, after=after, limit=limit, oldest_first=order == "asc")
        resp.media = page([shown(File.decode(stored)) for stored in found], more)

    async def _form(self, req: HttpRequest) -> MultipartForm:
        if not (req.content_type or "").startswith("multipart/form-data"):
            raise InvalidRequest("", "an upload is multipart/form-data with the fields purpose and file")
        counted = BufferedReader(self._counted(req.stream))
        form: MultipartForm = await MultipartFormHandler().deserialize_async(counted, req.content_type, None)
        return form

    async def _counted(self, stream: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        """All that comes, whatever it says of its length. Raises TooLarge."""
        count = 0
        async for chunk in stream:
            count += len(chunk)
            if count > self._limit + FORM_BYTES:
                raise TooLarge(f"the file exceeds {self._limit} bytes (KVR_FILE_MIB)")
            yield chunk

    async def _read(self, form: MultipartForm, growing: Growing) -> dict[str, str]:
        """Field → its text; of the file, its name. To the end of the form: a client that left did not mean the half."""
        fields: dict[str, str] = {}
        async for part in form:
            name = part.name or ""
            if name in fields:
                raise InvalidRequest(name, "comes twice")
            if name == "file":
                fields[name] = (part.filename or "file")[:255]
                await self._receive(part, growing)
            elif name in FIELDS:
                fields[name] = (await part.get_data()).decode(errors="replace")
            else:
                raise InvalidRequest(name[:100], "is not a known parameter")
        return fields

    async def _receive(self, part: BodyPart, growing: Growing) -> None:
        async for chunk in part.stream:
            await growing.write(chunk)
        if growing.size > self._limit:
            raise TooLarge(f"the file exceeds {self._limit} bytes (KVR_FILE_MIB)")

    def _lifetime(self, fields: Mapping[str, str]) -> float:
        """Seconds that the file is kept; and all fields are as they must be."""
        for name in ("purpose", "file"):
            if name not in fields:
                raise InvalidRequest(name, "is required")
        if fields["purpose"] != PURPOSE:
            raise InvalidRequest("purpose", f"{fields['purpose'][:40]!r} is not supported, only {PURPOSE!r}")
        anchor, seconds = (fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
        if anchor is None and seconds is None:
            return self._seconds
        if anchor != "created_at":
            raise InvalidRequest("expires_after[anchor]", "must be created_at")
        if (
            seconds is None
            or not re.fullmatch("[0-9]{1,8}", seconds)
            or not LEAST_SECONDS <= int(seconds) <= MOST_SECONDS
        ):
            raise InvalidRequest("expires_after[seconds]", f"must be a number from {LEAST_SECONDS} to {MOST_SECONDS}")
        return int(seconds)


class OneFile:
    def __init__(self, files: Files) -> None:
        self._files = files

    @Operation(answers={200: FileRecord}, errors=(404,))
    async def on_get(self, req: HttpRequest, resp: Response, file_id: str) -> None:
        """What is known of a file."""
        resp.media = shown(await find(self._files, file_id, req.context.key))

    @Operation(answers={200: FileDeleted}, errors=(404,))
    async def on_delete(self, req: HttpRequest, resp: Response, file_id: str) -> None:
        """Forgets a file. A batch that has yet to read it will fail."""
        file = await find(self._files, file_id, req.context.key)
        await self._files.remove(file.id)
        resp.media = {"id": file.id, "object": "file", "deleted": True}

    @Operation(answers={200: "application/octet-stream"}, errors=(404,))
    async def on_get_content(self, req: HttpRequest, resp: Response, file_id: str) -> None:
        """The file itself."""
        file = await find(self._files, file_id, req.context.key)
        path = self._files.path(file.id)
        if not path.is_file():
            raise FileUnknown(f"the content of {file.id} is gone, or API processes do not share KVR_FILES")
        resp.content_type = "application/octet-stream"
        resp.content_length = file.bytes
        resp.stream = _blocks(path)


async def _blocks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while block := await asyncio.to_thread(file.read, BLOCK):
            yield block
