"""A small web API of a fictional maker of tools, for tools_funcs/handbook_tools.py: what its warehouses hold.

GET /stock?product=oak_drill&warehouse=north   ->  {"product": ..., "warehouse": ..., "in_stock": 17}
GET /warehouses                                ->  ["north", "south", "harbour"]
"""

import json
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

WAREHOUSES = ("north", "south", "harbour")


def in_stock(product: str, warehouse: str) -> int:
    """The same number each time, so that questions about it have an answer."""
    return zlib.crc32(f"{product}/{warehouse}".encode()) % 400


def serve() -> int:
    """Answer on a free port of this machine for as long as this process lives; return the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, name="handbook-api", daemon=True).start()
    return server.server_port


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        address = urlsplit(self.path)
        asked = {key: values[0] for key, values in parse_qs(address.query).items()}
        if address.path == "/warehouses":
            self._say(200, list(WAREHOUSES))
        elif address.path == "/stock" and asked.get("product") and asked.get("warehouse") in WAREHOUSES:
            product, warehouse = asked["product"], asked["warehouse"]
            self._say(200, {"product": product, "warehouse": warehouse, "in_stock": in_stock(product, warehouse)})
        else:
            self._say(400, {"error": f"/stock wants product=NAME and warehouse, one of {', '.join(WAREHOUSES)}"})

    def _say(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: every request would be a line in the log of the tools."""
