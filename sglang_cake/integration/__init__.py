"""The package inside of SGLang. Only modules of this folder import SGLang."""
