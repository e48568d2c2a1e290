// What attention needs of the machine beyond wide_device.cuh, sm_90. A host build replaces this file too.
#pragma once

#include "wide_device.cuh"

namespace device {

// What uses this number comes behind what was waited for last.
ON_DEVICE void pin(float& x) { asm volatile("" : "+f"(x)); }
ON_DEVICE void await_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(group + 4) : "memory"); }
ON_DEVICE void let_group(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(group + 4) : "memory"); }
ON_DEVICE uint32_t ballot(bool x) { return __ballot_sync(0xffffffffu, x); }
// A wait without an end: where a kernel may trap, the compiler finds registers for the smallest of its roles only.
ON_DEVICE void barrier_await(Barrier* b, uint32_t parity) {
    while (!barrier_passed(b, parity)) {}
}
// All threads of the two groups that compute; those that copy are not among them.
ON_DEVICE void sync_groups() { asm volatile("bar.sync 3, 256;" ::: "memory"); }

// Start copying a tile to the same place in those CTAs of the cluster that `ranks` has a bit for; the barrier of each counts it.
ON_DEVICE void copy_tile_to(void* to, const Map& map, const Place& place, Barrier* b, uint32_t ranks) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2,%3,%4,%5,%6}], [%7], %8;"
                 ::"r"(shared_at(to)), "l"(&map), "r"(place.at[0]), "r"(place.at[1]), "r"(place.at[2]), "r"(place.at[3]), "r"(place.at[4]),
                 "r"(shared_at(b)), "h"(uint16_t(ranks)) : "memory");
}

// c += A B for 16 rows of B, of 256 columns in four pieces of 64 that lie 8192 bytes apart. A is held by the threads: lane (g, t) of
// warp w has in a[i] columns 2 t and 2 t + 1, further 8 for i >= 2, of row 16 w + g + i % 2 * 8.
ON_DEVICE void multiply_held_by_rows(float (&c)[128], const uint32_t* a, const void* b) {
    // Only the address within the CTA: above it are the bits of its rank in a cluster, and here of the distance.
    const uint64_t rows = uint64_t((shared_at(b) & 0x3ffff) >> 4) | 512ull << 16 | 64ull << 32 | 1ull << 62;
    asm volatile("{ wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
                 "}, {%128,%129,%130,%131}, %132, 1, 1, 1, 1; }"
                 : "+f"(c[0]),"+f"(c[1]),"+f"(c[2]),"+f"(c[3]),"+f"(c[4]),"+f"(c[5]),"+f"(c[6]),"+f"(c[7]),"+f"(c[8]),"+f"(c[9]),"+f"(c[10]),"+f"(c[11]),"+f"(c[12]),"+f"(c[13]),"+f"(c[14]),"+f"(c[15]),"+f"(c[16]),"+f"(c[17]),"+f"(c[18]),"+f"(c[19]),"+f"(c[20]),"+f"(c[21]),"+f"(c[22]),"+f"(c[23]),"+f"(c[24]),"+f"(c[25]),"+f"(c[26]),"+f"(c[27]),"+f"(c[28]),"+f"(c[29]),"+f"(c[30]),"+f"(c[31]),"+f"(c[32]),"+f"(c[33]),"+f"(c[34]),"+f"(c[35]),"+f"(c[36]),"+f"(c[37]),"+f"(c[38]),"+f"(c[39]),"+f"(c[40]),"+f"(c[41]),"+f"(c[42]),"+f"(c[43]),"+f"(c[44]),"+f"(c[45]),"+f"(c[46]),"+f"(c[47]),"+f"(c[48]),"+f"(c[49]),"+f"(c[50]),"+f"(c[51]),"+f"(c[52]),"+f"(c[53]),"+f"(c[54]),"+f"(c[55]),"+f"(c[56]),"+f"(c[57]),"+f"(c[58]),"+f"(c[59]),"+f"(c[60]),"+f"(c[61]),"+f"(c[62]),"+f"(c[63]),"+f"(c[64]),"+f"(c[65]),"+f"(c[66]),"+f"(c[67]),"+f"(c[68]),"+f"(c[69]),"+f"(c[70]),"+f"(c[71]),"+f"(c[72]),"+f"(c[73]),"+f"(c[74]),"+f"(c[75]),"+f"(c[76]),"+f"(c[77]),"+f"(c[78]),"+f"(c[79]),"+f"(c[80]),"+f"(c[81]),"+f"(c[82]),"+f"(c[83]),"+f"(c[84]),"+f"(c[85]),"+f"(c[86]),"+f"(c[87]),"+f"(c[88]),"+f"(c[89]),"+f"(c[90]),"+f"(c[91]),"+f"(c[92]),"+f"(c[93]),"+f"(c[94]),"+f"(c[95]),"+f"(c[96]),"+f"(c[97]),"+f"(c[98]),"+f"(c[99]),"+f"(c[100]),"+f"(c[101]),"+f"(c[102]),"+f"(c[103]),"+f"(c[104]),"+f"(c[105]),"+f"(c[106]),"+f"(c[107]),"+f"(c[108]),"+f"(c[109]),"+f"(c[110]),"+f"(c[111]),"+f"(c[112]),"+f"(c[113]),"+f"(c[114]),"+f"(c[115]),"+f"(c[116]),"+f"(c[117]),"+f"(c[118]),"+f"(c[119]),"+f"(c[120]),"+f"(c[121]),"+f"(c[122]),"+f"(c[123]),"+f"(c[124]),"+f"(c[125]),"+f"(c[126]),"+f"(c[127])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
}

// As multiply_64, where A is held in the same way.
ON_DEVICE void multiply_64_held(float (&c)[32], const uint32_t* a, const void* b, bool add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
                 "}, {%32,%33,%34,%35}, %36, p, 1, 1, 0; }"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile_at(b)), "r"(int(add)));
}

}  // namespace device
