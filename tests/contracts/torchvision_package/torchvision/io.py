ImageReadMode = decode_image = read_image = None
