"""Image formats that Pillow does not know, a file each; read only where a file asks for one."""
