"""The doctor's examinations that start processes and import torch."""

from __future__ import annotations

import pytest

from tiderl.observe.doctor import examine

pytestmark = pytest.mark.live


def test_the_doctor_tries_torch_and_a_small_model_in_children() -> None:
    findings = {finding.name: finding for finding in examine()}
    assert findings["child processes"].status == "ok"
    if findings["extra train"].status == "ok":
        assert findings["torch"].status != "fail"
        assert findings["model"].status == "ok" and "agree to" in findings["model"].detail
