"""Run records: plain files under ``runs/<id>/``, written atomically, queried where they lie. No torch, no server."""
