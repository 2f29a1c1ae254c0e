"""A device of a gateway in plain Python: it needs nothing of fedstream.

    python plain_device.py https://gateway.example:8443 INVITE [CA_FILE]

It trains PyTorch's `Linear(2, 2)` on two clouds of points until the run is over. Other models and
data go into `train`; the rest is the protocol, which GET /v1/openapi.json describes.
"""

import base64
import hashlib
import json
import secrets
import sys
import time

import numpy as np
import requests
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

INPUTS, CLASSES, SAMPLES, LR = 2, 2, 100, 0.1


def points(seed):
    """Data of the device, which never leave it."""
    y = np.arange(SAMPLES) % CLASSES
    return np.random.default_rng(seed).normal(size=(SAMPLES, INPUTS)) + 3 * y[:, None], y


def measure(model, device):
    """The metrics of `model` on the device's test data: each sum, and its weight."""
    x, y = points((device, 1))
    z = x @ model[:-CLASSES].reshape(CLASSES, INPUTS).T + model[-CLASSES:]
    hits = int((z.argmax(axis=1) == y).sum())
    return {"samples": SAMPLES, "sums": {"accuracy": [hits, SAMPLES]}}


def train(model, device, steps):
    """Full gradient steps on `model`: weights (classes, inputs), then biases."""
    x, y = points(device)
    weight, bias = model[:-CLASSES].reshape(CLASSES, INPUTS), model[-CLASSES:]
    for _ in range(steps):
        p = np.exp(x @ weight.T + bias)
        p /= p.sum(axis=1, keepdims=True)
        loss = -np.log(p[np.arange(SAMPLES), y]).mean()
        error = (p - np.eye(CLASSES)[y]) / SAMPLES
        weight -= LR * error.T @ x
        bias -= LR * error.sum(axis=0)
    return {"samples": SAMPLES, "steps": steps, "lr": LR, "loss": float(loss)}


class Gateway:
    def __init__(self, url, ca=None):
        self.url, self.http, self.ca = url, requests.Session(), ca or True
        self.host = url.partition("://")[2].lower().removesuffix(":443")
        self.key, self.keyid = Ed25519PrivateKey.generate(), "new"  # keep the key: it is the device

    def signed(self, path, **fields):  # RFC 9421, in the one form that gateways accept
        body = json.dumps(fields).encode()
        digest = f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"
        about = f'("@method" "@authority" "@path" "content-digest");created={int(time.time())};'
        about += f'nonce="{secrets.token_urlsafe(16)}";keyid="{self.keyid}";alg="ed25519"'
        base = f'"@method": POST\n"@authority": {self.host}\n"@path": {path}\n"content-digest": '
        signature = self.key.sign(f'{base}{digest}\n"@signature-params": {about}'.encode())
        headers = {"Content-Type": "application/json", "Content-Digest": digest}
        headers["Signature"] = f"fedstream=:{base64.b64encode(signature).decode()}:"
        headers["Signature-Input"] = f"fedstream={about}"
        answer = self.http.post(self.url + path, data=body, verify=self.ca, headers=headers)
        answer.raise_for_status()
        return answer.json()

    def enrol(self, invite):
        pem = self.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        self.keyid = self.signed("/v1/devices", invite=invite, public_key=pem.decode())["device"]

    def ask(self, method, path, **how):
        """A request with the token, again with a new token or when the gateway is busy."""
        while True:
            answer = self.http.request(method, self.url + path, verify=self.ca, timeout=90, **how)
            if answer.status_code == 401:
                self.http.headers["Authorization"] = f"Bearer {self.signed('/v1/token')['token']}"
            elif answer.status_code in (202, 429, 503):  # 202: the update is not admitted yet
                time.sleep(float(answer.headers.get("Retry-After", 1)))
            else:
                return answer


def give_up(gateway, offer, why):
    """End with the reason; another device can do the task at once."""
    task, said = offer["task"]["id"], {"attempt": offer["attempt"], "reason": "raised ValueError"}
    gateway.ask("POST", f"/v1/tasks/{task}/give-up", json=said)
    sys.exit(f"task {task}: given up: {why}")


def perform(gateway, offer):
    """One task: a model, some steps on the device's data or its metrics, and the answer."""
    task, model = offer["task"], offer["model"]
    found = gateway.ask("GET", model["url"])
    if found.status_code == 404:  # there is a newer one: check in again
        return
    made = hashlib.sha256 if len(model["digest"]) == 64 else blake3  # else it ends in -blake3
    right = model["digest"].startswith(made(found.content).hexdigest())
    update = offer.get("update", {"format": "f32"})  # none if the model is only to be measured
    if not right or {model["format"], update["format"]} != {"f32"}:
        give_up(gateway, offer, "not the model that was offered, or in another format than f32")
    if len(found.content) != 4 * CLASSES * (INPUTS + 1):
        give_up(gateway, offer, f"`train` is for another model than one of {model['size']} bytes")
    x = np.array(x_tau := np.frombuffer(found.content, "<f4"))
    if "measurement" in offer:
        found = gateway.ask("POST", offer["measurement"]["url"], json=measure(x, task["device"]))
        print(f"task {task['id']}: measured: {found.status_code == 200}", flush=True)
        return
    report = train(x, task["device"], task.get("steps") or task.get("epochs") or 1)
    data = (x if update["sends"] == "model" else x - x_tau).tobytes()
    report |= {"tau": model["version"], "base": model["digest"], "layout": update["layout"]}
    report |= {"digest": hashlib.sha256(data).hexdigest(), "format": "f32"}
    headers = {"Upload-Complete": "?1", "Update-Report": json.dumps(report)}
    receipt = gateway.ask("POST", update["url"], data=data, headers=headers)
    print(f"task {task['id']}: {receipt.json()}", flush=True)


def main(url, invite, ca=None):
    gateway = Gateway(url, ca)
    gateway.enrol(invite)
    while True:
        asks = {"nonce": secrets.token_urlsafe(16), "wait_s": 50, "formats": ["f32"]}
        asks["evaluates"] = True
        answer = gateway.ask("POST", "/v1/check-in", json=asks)
        if answer.status_code == 410:
            return  # the run is over
        if answer.status_code == 200:
            perform(gateway, answer.json())
        else:
            time.sleep(float(answer.headers.get("Retry-After", 1)))


if __name__ == "__main__":
    main(*sys.argv[1:])
