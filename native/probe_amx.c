// Exits 0 if the AMX tile instructions run here; see CMakeLists.txt.
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

__attribute__((target("amx-tile"))) static void use_tile(void) {
    _Alignas(64) unsigned char config[64] = { 1 }; // palette 1
    config[16] = 64; // columns of tile 0, bytes
    config[48] = 16; // rows of tile 0
    _tile_loadconfig(config);
    _tile_zero(0);
    _tile_release();
}

int main(void) {
#if defined(__linux__)
    if (syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */)) {
        return 1;
    }
#endif
    use_tile();
    return 0;
}
