pil_to_tensor = to_pil_image = None
