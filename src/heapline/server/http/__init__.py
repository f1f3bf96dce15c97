"""The HTTP faces: `/v1/…` in JSON, and what a browser, a probe or a scraper asks for."""
