"""`transformers serve`, or what stands for it here, is started for a measurement and is gone after it."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

SERVER = f"""#!{sys.executable}
import http.server, sys
class Models(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Models).serve_forever()
"""
MEASURES = """
import shutil, sys, time
from pathlib import Path
from bench.rival import transformers_serve
shutil.which = lambda *_, **__: sys.argv[1]
with transformers_serve(Path("model")):
    print("up", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("seconds", "code"), [(0, 0), (60, 128 + 15)])
def test_it_is_gone_when_it_has_been_measured_and_when_that_is_ended(tmp_path: Path, seconds: int, code: int) -> None:
    """60: a SIGTERM comes before that is over, and without the handler leaves the server behind."""
    server = tmp_path / "transformers"
    server.write_text(SERVER)
    server.chmod(0o755)
    command = [sys.executable, "-c", MEASURES, str(server), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()) as measures:
        assert measures.stdout is not None
        assert measures.stdout.readline() == "up\n"
        children = psutil.Process(measures.pid).children() if seconds else []
        if seconds:
            assert len(children) == 1
            measures.terminate()
        assert measures.wait(30) == code
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
