"""SGLang servers, on GPU and CPU."""
