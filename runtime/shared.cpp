// The shared library is made of the archive's objects; CMake wants a source of its own.
