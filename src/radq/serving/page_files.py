"""The routes of the page: `/` and the files that it loads."""

from pathlib import Path

from fastapi import FastAPI, HTTPException
from fastapi.responses import FileResponse, Response

PAGE = Path(__file__).parent / "page"


def add_page(app: FastAPI) -> None:
    files = {file.name: file for file in PAGE.iterdir() if file.is_file()}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(files["index.html"], headers={"Cache-Control": "no-cache"})

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "there is no such file.")
        return FileResponse(files[name], headers={"Cache-Control": "no-cache"})
