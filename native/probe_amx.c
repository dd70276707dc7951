// Exits 0 if AMX tiles work here as this compiler compiles them; see CMakeLists.txt.
// GCC 12 tells the optimiser that _tile_loadconfig reads 8 bytes of its 64-byte argument: the rest of a configuration
// on the stack, as ggml-cpu/amx writes it, is dropped as dead stores, and the first tile instruction faults.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

struct tile_config {
    unsigned char  palette_id;
    unsigned char  start_row;
    unsigned char  reserved[14];
    unsigned short columns[16];
    unsigned char  rows[16];
};

__attribute__((noinline, target("amx-tile"))) static void use_tiles(void) {
    _Alignas(64) struct tile_config config = { 0 };
    config.palette_id = 1;
    for (int i = 0; i < 8; ++i) {
        config.columns[i] = 64;
        config.rows[i] = 16;
    }
    _tile_loadconfig(&config);
    _tile_zero(7);
    _tile_release();
}

int main(void) {
    const int ARCH_REQ_XCOMP_PERM = 0x1023;
    const int TILE_DATA = 18;
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA)) {
        return 1;
    }
    use_tiles();
    return 0;
}
