"""Two replicas of a pair behind one address, with Ray Serve.

    serve run deploy.ray_serve:app              # the demo pair, at http://127.0.0.1:8000

`dflash serve --engine ray` writes a config for the same application, for any pair.
"""

from dflash.cluster.ray_app import build

app = build({"replicas": 2, "threads": 1})
